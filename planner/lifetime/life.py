"""Weeks of a job's life under one policy: how much of the healthy job's work is done while devices fail."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plans import Arrangement, Health, Infeasible
from ..resilience import POLICIES, Job, StateMove, Workbench, healthy_arrangement, replan_job, state_move
from .rates import Event, Rates

__all__ = ["POLICY_NAMES", "Life", "compared", "live"]

POLICY_NAMES = ("restart", "spare", *(name for name in POLICIES if name != "nothing"), "ours")

# Policies that answer slow devices; the others run on as slow as they are.
_SEE_SLOW = ("greyhound", "recycle+", "oobleck+", "resihp", "ours")
_SPARE_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Shares of the whole span: work done against the healthy job's (`goodput`), time stopped for want of devices, and
    time in pauses (detection, regrouping, moving state, restarts, work lost)."""

    policy: str
    goodput: float
    stopped: float
    paused: float
    changes: int


Choice = tuple[Arrangement | None, float]


def live(
    job: Job, rates: Rates, events: Sequence[Event], span_s: float, policy: str, *, bench: Workbench | None = None
) -> Life:
    """Live through `events` by `policy`, one of POLICY_NAMES.

    restart: from the last checkpoint, when all devices are back. spare: the same with spare nodes (2 %, one at least)
    that come at once. The others change the arrangement in place and lose the step in flight; where a policy has no
    arrangement the job stops until one is back.
    """
    return _Course(job, rates, policy, bench or Workbench(job)).run(events, span_s)


class _Course:
    """The state of one life."""

    def __init__(self, job: Job, rates: Rates, policy: str, bench: Workbench) -> None:
        self.job, self.rates, self.policy, self.bench = job, rates, policy, bench
        self.start = healthy_arrangement(job)
        self.healthy_s = bench.price(self.start, Health(), usual=True)
        nodes = -(-job.devices // job.devices_per_node)
        self.spares = max(1, round(_SPARE_SHARE * nodes)) if policy == "spare" else 0
        mean = rates.mean_between_failures_s(nodes)
        # Daly and Young: the interval at which writing and losing cost the same.
        self.interval_s = math.sqrt(2 * rates.costs.checkpoint_s * mean) if math.isfinite(mean) else math.inf
        self.horizon_s = min(mean, 7 * 86400.0)
        self.known: dict[Health, Choice] = {}
        self.moved: tuple[Arrangement, Arrangement, Health, StateMove] | None = None
        self.done_s = self.stopped_s = self.paused_s = 0.0
        self.changes = 0

    def run(self, events: Sequence[Event], span_s: float) -> Life:
        ends: list[tuple[float, int]] = []
        on: dict[int, Event] = {}
        arrangement, step_s = self._choose(Health(), self.start)
        now, at = 0.0, 0
        while True:
            upcoming = events[at].at_s if at < len(events) else math.inf
            until = min(span_s, upcoming, ends[0][0] if ends else math.inf)
            self._work(until - now, arrangement, step_s)
            now = until
            if now >= span_s:
                break
            before = self._health(on)
            lost = False
            if ends and ends[0][0] <= upcoming:
                on.pop(heapq.heappop(ends)[1])
            else:
                lost = events[at].speed == 0
                if events[at].devices:
                    on[at] = events[at]
                    heapq.heappush(ends, (now + events[at].lasts_s, at))
                at += 1
            after = self._health(on)
            if before == after and not lost:
                continue
            changed, seconds = self._choose(after, arrangement or self.start)
            pause = self._pause(arrangement, changed, before, after, lost, step_s)
            # A pause is taken out of the time that follows; work lost is paid for the same way.
            self.paused_s += pause
            self.done_s -= pause * self.healthy_s / seconds if math.isfinite(seconds) else 0.0
            self.changes += changed != arrangement
            arrangement, step_s = changed, seconds
        overhead = 1.0 if math.isinf(self.interval_s) else 1 / (1 + self.rates.costs.checkpoint_s / self.interval_s)
        return Life(
            policy=self.policy,
            goodput=max(0.0, self.done_s * overhead / span_s),
            stopped=self.stopped_s / span_s,
            paused=self.paused_s / span_s,
            changes=self.changes,
        )

    def _work(self, seconds: float, arrangement: Arrangement | None, step_s: float) -> None:
        if arrangement is None or not math.isfinite(step_s):
            self.stopped_s += seconds
        else:
            self.done_s += seconds * self.healthy_s / step_s

    def _health(self, on: dict[int, Event]) -> Health:
        """The devices as they are, one hit twice as slow as the worse says; spare nodes stand in for dead ones."""
        speeds: dict[int, float] = {}
        for event in on.values():
            for device in event.devices:
                speeds[device] = min(event.speed, speeds.get(device, 1.0))
        if self.spares:
            dead = sorted({self.job.node(device) for device, speed in speeds.items() if speed == 0})
            replaced = set(dead[: self.spares])
            speeds = {device: speed for device, speed in speeds.items() if self.job.node(device) not in replaced}
        return Health.of(speeds)

    def _choose(self, health: Health, before: Arrangement) -> Choice:
        """The policy's arrangement and its seconds; (None, inf) where it has none."""
        # Ours weighs the move from where it is; it is asked once per state, from where it first came to it.
        if health not in self.known:
            self.known[health] = self._decide(self.policy, health, before)
        return self.known[health]

    def _decide(self, name: str, health: Health, before: Arrangement) -> Choice:
        if not health.speeds:
            # Nobody is credited with what a better division of the healthy job would gain.
            return self.start, self.healthy_s
        if name in ("restart", "spare"):
            return (None, math.inf) if health.dead else (self.start, self._price(self.start, health))
        if name == "ours":
            try:
                found = replan_job(self.job, health, before=before, horizon_s=self.horizon_s, bench=self.bench)
            except Infeasible:
                return None, math.inf
            self.moved = before, found.arrangement, health, found.move
            return found.arrangement, found.step_s
        seen = health if name in _SEE_SLOW else Health.of(dict.fromkeys(health.dead, 0.0))
        if not seen.speeds:
            return self.start, self._price(self.start, health)
        made = POLICIES[name](self.bench, seen)
        return (None, math.inf) if made is None else (made, self._price(made, health))

    def _price(self, arrangement: Arrangement, health: Health) -> float:
        return self.bench.price(arrangement, health, usual=True)

    def _pause(
        self,
        before: Arrangement | None,
        after: Arrangement | None,
        was: Health,
        now: Health,
        lost: bool,
        step_s: float,
    ) -> float:
        """Seconds without progress that the change costs, work lost included."""
        costs = self.rates.costs
        step = step_s if math.isfinite(step_s) else 0.0
        if after is None:
            return 0.0
        if before is None or (self.policy in ("restart", "spare") and lost):
            # From the last checkpoint: on average half an interval's work is done again.
            return costs.detect_s + costs.restart_s + self.interval_s / 2
        if before == after:
            return costs.detect_s + costs.regroup_s + step / 2 if lost else 0.0
        # What was weighed when this change was decided, if it was just now.
        known = self.moved is not None and self.moved[:3] == (before, after, now)
        move = self.moved[3] if known and self.moved else state_move(self.job, before, after, now)
        seconds = move.seconds + move.missing_bytes / costs.storage_bytes_per_s / max(1, len(after.devices))
        pause = costs.regroup_s + seconds
        return pause + costs.detect_s + step / 2 if lost else pause


def compared(
    job: Job,
    rates: Rates,
    events: Sequence[Event],
    span_s: float,
    policies: Sequence[str],
    tell: Callable[[Life], None] | None = None,
) -> list[Life]:
    """The same events under each policy; `tell` is called with each as it is done."""
    bench, lives = Workbench(job), []
    for policy in policies:
        lives.append(live(job, rates, events, span_s, policy, bench=bench))
        if tell is not None:
            tell(lives[-1])
    return lives

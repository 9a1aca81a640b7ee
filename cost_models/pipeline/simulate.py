"""When each action of a schedule starts and ends: every action as soon as its rank and its data allow.

Data: F of stage s after F of s - 1; I or B of s after I or B of s + 1, of the last stage after its own F; W after I;
plus the transfer where the two stages are on different ranks. A rank does its actions in the order of the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ...plans import Action, RequestError, Schedule, TimedAction
from .costs import StageCosts

__all__ = ["Bubble", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """Idle time of one rank: before the first backward anywhere, after the last forward anywhere, and between."""

    warmup: float
    residual: float
    cooldown: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.warmup + self.residual + self.cooldown


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule costs. `timeline`, `bubbles`, `memory` and `peak_memory` have one entry per rank.

    makespan: end of the last action. longest_stage_time: the largest span from a rank's first start to its last end
    (the zero-bubble paper's measure). step_time: the latest end of a rank's last action with its `finish` after it.
    memory: (time, amount from then on). critical_path: actions and their ranks, first to last, that fix the makespan.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    longest_stage_time: float
    step_time: float
    bubbles: tuple[Bubble, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    peak_memory: tuple[float, ...]
    critical_path: tuple[tuple[int, TimedAction], ...]


@dataclass(slots=True)
class _Line:
    """What one rank, or its own line for gathers and reductions, has still to do."""

    rank: int
    actions: tuple[Action, ...]
    next: int = 0
    free_at: float = 0.0
    last: Action | None = None


class _Run:
    """The state of one simulation: what has ended when, and what made it wait."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.done: dict[Action, TimedAction] = {}
        self.cause: dict[Action, Action | None] = {}
        self.rank_of: dict[Action, int] = {}
        self.needs: dict[Action, list[tuple[Action, float]]] = {}
        explicit = {action for row in schedule.actions for action in row}
        self.gathered = {action.stage for action in explicit if action.kind == "UNSHARD"}
        self.sent = {action for action in explicit if action.kind.startswith("SEND")}
        self.microbatches = schedule.microbatches
        self.explicit = explicit

    def sources(self, action: Action) -> Iterator[tuple[Action, float]]:
        """What must have ended before `action` starts, each with the time from that end on."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == "W":
            yield Action(stage, "I", microbatch), 0.0
        elif kind in "FBI":
            yield from self._data(action)
            if stage in self.gathered:
                yield Action(stage, "UNSHARD"), 0.0
        elif kind == "REDUCE_GRAD":
            for index in range(self.microbatches):
                yield self._last_part(stage, index), 0.0
        elif kind.startswith("RECV") and (self.costs.blocking or not self.costs.overlap):
            yield self._sender(action)

    def _data(self, action: Action) -> Iterator[tuple[Action, float]]:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind != "F":
            yield Action(stage, "F", microbatch), 0.0
        other = stage - 1 if kind == "F" else stage + 1
        if not 0 <= other < self.costs.stages:
            return
        made = Action(other, "F", microbatch) if kind == "F" else self._backward(other, microbatch)
        boundary = min(stage, other)
        if self.schedule.placement[stage] == self.schedule.placement[other]:
            yield made, 0.0
            return
        send = Action(other, "SEND_F" if kind == "F" else "SEND_B", microbatch)
        if send not in self.sent:
            yield made, self.costs.transfer(boundary)
        elif self.costs.overlap:
            yield send, self.costs.transfer(boundary)
        else:
            yield send, 0.0

    def _sender(self, receive: Action) -> tuple[Action, float]:
        forward = receive.kind == "RECV_F"
        other = receive.stage - 1 if forward else receive.stage + 1
        lag = self.costs.transfer(min(receive.stage, other)) if self.costs.overlap else 0.0
        return Action(other, "SEND_F" if forward else "SEND_B", receive.microbatch), lag

    def _backward(self, stage: int, microbatch: int | None) -> Action:
        whole = Action(stage, "B", microbatch)
        return whole if whole in self.explicit else Action(stage, "I", microbatch)

    def _last_part(self, stage: int, microbatch: int) -> Action:
        whole = Action(stage, "B", microbatch)
        return whole if whole in self.explicit else Action(stage, "W", microbatch)

    def duration(self, action: Action) -> float:
        if action.kind.startswith("SEND") and not self.costs.overlap:
            other = action.stage + (1 if action.kind == "SEND_F" else -1)
            return self.costs.transfer(min(action.stage, other))
        return self.costs.duration(action.kind, action.stage, action.microbatch)

    def advance(self, line: _Line) -> Action | None:
        """Do what this line can do now; the action it waits for, None at its end."""
        while line.next < len(line.actions):
            action = line.actions[line.next]
            start, cause = line.free_at, line.last
            for source, lag in self.sources(action):
                made = self.done.get(source)
                if made is None:
                    return source
                if made.end + lag > start:
                    start, cause = made.end + lag, source
            end = start + self.duration(action)
            self.done[action] = TimedAction(action, start, end)
            self.cause[action] = cause
            self.rank_of[action] = line.rank
            line.free_at, line.last = end, action
            line.next += 1
        return None


def simulate(schedule: Schedule, costs: StageCosts) -> Simulation:
    """The times, bubbles, memory and critical path of `schedule` under `costs`.

    RequestError if the schedule is no schedule of these stages, if receives of a pair of ranks are not in the order
    of its sends, or if it stands still: the message names the first action that waits for ever.
    """
    costs = costs.complete()
    if schedule.stages != costs.stages:
        raise RequestError(
            f"'schedule' must have a cost for each stage, got {schedule.stages} stages and {costs.stages} costs"
        )
    if costs.microbatch_scale and len(costs.microbatch_scale) != schedule.microbatches:
        raise RequestError(
            f"'microbatch_scale' must have {schedule.microbatches} entries, one per micro-batch, got"
            f" {len(costs.microbatch_scale)}"
        )
    schedule.check()
    if not costs.overlap or costs.blocking:
        has_sends = any(action.kind.startswith("SEND") for row in schedule.actions for action in row)
        schedule = schedule if has_sends else schedule.with_communication()
    _check_pairs(schedule)
    run = _Run(schedule, costs)
    lines = list(_lines(schedule, costs))
    _run_lines(run, lines)
    return _report(run, schedule, costs)


def _lines(schedule: Schedule, costs: StageCosts) -> Iterator[_Line]:
    apart = ("UNSHARD", "REDUCE_GRAD") if costs.overlap else ()
    for rank, row in enumerate(schedule.actions):
        yield _Line(rank, tuple(action for action in row if action.kind not in apart))
        aside = tuple(action for action in row if action.kind in apart)
        if aside:
            yield _Line(rank, aside)


def _run_lines(run: _Run, lines: list[_Line]) -> None:
    waiting: dict[Action, list[_Line]] = defaultdict(list)
    ready = list(reversed(lines))
    while ready:
        line = ready.pop()
        first = line.next
        source = run.advance(line)
        if source is not None:
            waiting[source].append(line)
        for action in line.actions[first : line.next]:
            ready += waiting.pop(action, [])
    stuck = [(source, line) for source, held in waiting.items() for line in held]
    if stuck:
        # A rank that waits for what it would do itself later says most.
        own = [(source, line) for source, line in stuck if source in line.actions]
        source, line = (own or stuck)[0]
        raise RequestError(
            f"'schedule' must not stand still, got {line.actions[line.next]} on rank {line.rank}"
            f" waiting for {source}, which never"
            f" ends; {len(stuck)} ranks wait\n{_marked(run.schedule, {line.actions[line.next] for _, line in stuck})}"
        )


def _marked(schedule: Schedule, waiting: set[Action]) -> str:
    rows = (" ".join(f">{action}<" if action in waiting else str(action) for action in row) for row in schedule.actions)
    return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


def _check_pairs(schedule: Schedule) -> None:
    """Between two ranks the k-th receive must be of the k-th send: nothing else tells the tensors apart."""
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    step = {"SEND_F": 1, "SEND_B": -1, "RECV_F": -1, "RECV_B": 1}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind not in step:
                continue
            other = schedule.placement[action.stage + step[action.kind]]
            if action.kind.startswith("SEND"):
                sends[rank, other].append(action)
            else:
                sent = Action(action.stage + step[action.kind], action.kind.replace("RECV", "SEND"), action.microbatch)
                receives[other, rank].append(sent)
    for pair in sends.keys() | receives.keys():
        if sends[pair] != receives[pair]:
            differs = next(
                (s, r) for s, r in zip([*sends[pair], None], [*receives[pair], None], strict=False) if s != r
            )
            raise RequestError(
                f"'schedule' must receive in the order of the sends, got {differs[0]} sent from rank"
                f" {pair[0]} to rank {pair[1]}"
                f" where what {differs[1]} sends is received"
            )


def _report(run: _Run, schedule: Schedule, costs: StageCosts) -> Simulation:
    timeline = tuple(tuple(run.done[action] for action in row) for row in schedule.actions)
    compute = [[timed for timed in row if timed.action.is_compute or timed.start < timed.end] for row in timeline]
    makespan = max((timed.end for row in timeline for timed in row), default=0.0)
    spans = [max(t.end for t in row) - min(t.start for t in row) for row in compute if row]
    finish = [sum(costs.finish[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.ranks)]
    ends = [max((t.end for t in row), default=0.0) for row in timeline]
    memory = tuple(_memory(row, costs) for row in timeline)
    return Simulation(
        timeline=timeline,
        makespan=makespan,
        longest_stage_time=max(spans, default=0.0),
        step_time=max(end + more for end, more in zip(ends, finish, strict=True)),
        bubbles=tuple(_bubbles(timeline, makespan)),
        memory=memory,
        peak_memory=tuple(max(amount for _, amount in curve) for curve in memory),
        critical_path=_critical_path(run),
    )


def _memory(row: tuple[TimedAction, ...], costs: StageCosts) -> tuple[tuple[float, float], ...]:
    """The rank's activations over time, in the order of its actions: taken at a start, given back at an end."""
    amount, curve = 0.0, [(0.0, 0.0)]
    for timed in row:
        change = costs.memory(timed.action.kind, timed.action.stage)
        if change:
            amount += change
            curve.append((timed.start if change > 0 else timed.end, amount))
    return tuple(curve)


def _bubbles(timeline: tuple[tuple[TimedAction, ...], ...], makespan: float) -> Iterator[Bubble]:
    everything = [timed for row in timeline for timed in row]
    first_back = min((t.start for t in everything if t.action.kind in ("B", "I")), default=makespan)
    last_forward = max((t.end for t in everything if t.action.kind == "F"), default=makespan)
    last_forward = max(first_back, last_forward)
    for row in timeline:
        busy = [(t.start, t.end) for t in row if t.action.is_compute]
        edges = [0.0, *(edge for pair in busy for edge in pair), makespan]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        yield Bubble(
            warmup=sum(max(0.0, min(end, first_back) - start) for start, end in gaps),
            residual=sum(max(0.0, min(end, last_forward) - max(start, first_back)) for start, end in gaps),
            cooldown=sum(max(0.0, end - max(start, last_forward)) for start, end in gaps),
        )


def _critical_path(run: _Run) -> tuple[tuple[int, TimedAction], ...]:
    action = max(run.done, key=lambda one: run.done[one].end, default=None)
    path: list[tuple[int, TimedAction]] = []
    while action is not None:
        path.append((run.rank_of[action], run.done[action]))
        action = run.cause[action]
    return tuple(reversed(path))

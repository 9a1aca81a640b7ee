"""The new arrangement of a job when devices fail or slow down, what it gains, and what the change costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...plans import Arrangement, Health, RequestError
from .groups import node_options
from .job import Job
from .moves import StateMove, state_moves
from .policies import POLICIES, healthy_arrangement
from .search import HUGE_JOB, Found, candidates
from .workbench import Workbench, group_of

__all__ = ["Replanned", "lower_bound_s", "replan_job"]

# So many of the fastest arrangements are weighed against what the change to them costs.
_WEIGHED = 12
# The policies that are looked at for jobs of more devices than HUGE_JOB.
_QUICK = ("nothing", "drop", "greyhound")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """`gap`: by which share step_s is above a bound that no arrangement and schedule undercuts. `origin`: how it was
    found. `move`: the change from the arrangement before. kept_share: speed against the healthy job's."""

    arrangement: Arrangement
    step_s: float
    lower_bound_s: float
    move: StateMove
    origin: str
    kept_share: float

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return self.step_s / self.lower_bound_s - 1


def replan_job(
    job: Job,
    health: Health | Mapping[int, float],
    *,
    before: Arrangement | None = None,
    horizon_s: float | None = None,
    bench: Workbench | None = None,
) -> Replanned:
    """The arrangement that does most steps within `horizon_s` seconds, the change to it included; the fastest where no
    horizon is given.

    before: the arrangement whose state lies on the devices, by default the healthy job's. bench: of an earlier call for
    the same job, to save time. Equal arguments give equal answers on every rank. Infeasible where nothing fits.
    """
    bench = bench or Workbench(job)
    if bench.job != job:
        raise RequestError("'bench' must be of the same job, got another's; leave it out")
    if horizon_s is not None and not horizon_s > 0:
        raise RequestError(f"'horizon_s' must be positive, got {horizon_s}")
    health = Health.of(health, job.devices)
    start = before or healthy_arrangement(job)
    start.check(job.layers)
    found = _with_policies(bench, health, candidates(bench, health), start)
    # Nothing to change is always among what is weighed.
    weighed_most = _WEIGHED if job.devices <= HUGE_JOB else _WEIGHED // 4
    few = found[:weighed_most] + [one for one in found[weighed_most:] if one.arrangement == start]
    moves = state_moves(job, start, [one.arrangement for one in few], health)
    weighed = list(zip(few, moves, strict=True))
    best, move = min(weighed, key=lambda pair: _cost(pair[0], pair[1], horizon_s))
    healthy = bench.price(healthy_arrangement(job), Health())
    return Replanned(
        arrangement=best.arrangement,
        step_s=best.step_s,
        lower_bound_s=lower_bound_s(job, health),
        move=move,
        origin=best.origin,
        kept_share=healthy / best.step_s,
    )


def _cost(found: Found, move: StateMove, horizon_s: float | None) -> tuple[float, float, str]:
    if horizon_s is None:
        return found.step_s, move.seconds, found.arrangement.digest()
    steps = max(0.0, horizon_s - move.seconds) / found.step_s
    return -steps, found.step_s, found.arrangement.digest()


def _with_policies(bench: Workbench, health: Health, found: list[Found], start: Arrangement) -> list[Found]:
    """The policies' arrangements too, and the one before where it still runs; the fastest first, each once."""
    huge = bench.job.devices > HUGE_JOB
    for name, policy in POLICIES.items():
        if huge and name not in _QUICK:
            continue
        made = policy(bench, health)
        if made is not None:
            found = [*found, Found(arrangement=made, step_s=bench.price(made, health), origin=name)]
    found = [*found, Found(arrangement=start, step_s=bench.price(start, health), origin="before")]
    unique = {one.arrangement: one for one in reversed(found) if math.isfinite(one.step_s)}
    # Of equal ones those in which micro-batches stay in their replica.
    return sorted(
        unique.values(), key=lambda one: (one.step_s, one.arrangement.loads is not None, one.arrangement.digest())
    )


def lower_bound_s(job: Job, health: Health) -> float:
    """No arrangement takes less: the computation of all micro-batches over the best groups of every node, and one
    micro-batch through the fastest groups."""
    speeds = job.speeds(health)
    total, fastest = 0.0, 0.0
    kinds: dict[tuple[float, ...], float] = {}
    for first in range(0, job.devices, job.devices_per_node):
        node = range(first, min(first + job.devices_per_node, job.devices))
        kind = tuple(sorted(speeds[device] for device in node))
        if kind not in kinds:
            groups = node_options(node, speeds, job.degrees)
            kinds[kind] = sum(len(g) * group_of(g, speeds)[1] for g in groups[0]) if groups else 0.0
            for option in groups:
                fastest = max([fastest, *(len(g) * group_of(g, speeds)[1] for g in option)])
        total += kinds[kind]
    if not total:
        return math.inf
    return max(job.work_s * job.microbatches / total, job.work_s / fastest)

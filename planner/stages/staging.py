"""Partition, placement and schedule of a planned model's units: the stages of a pipeline, priced and within memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from ...cost_models.pipeline import Simulation, planned_costs, simulate
from ...plans import Infeasible, RequestError, Schedule
from ...plans.actions import Action
from ...plans.pipelines import Pipeline, StageCost
from ..pipeline import Clock, LayerProfile, tune_profile
from ..zoo import chunks_of, named_schedule
from .units import Unit

__all__ = [
    "PUBLISHED",
    "Border",
    "Staged",
    "balanced_cuts",
    "balanced_rows",
    "fits_rank",
    "fused",
    "published_stages",
    "restaged",
    "stage_units",
    "staged",
]

# Searches work in microseconds: their tolerances are absolute.
_SCALE = 1e6
# Steps that differ by less are equally long.
_EVEN = 1e-12
# How often the memory given to the search is corrected by what its result takes.
_TRIES = 4
PUBLISHED = ("1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Units in stages on pipeline ranks with a schedule; seconds and bytes. `cuts` are indices of units, `peaks` the
    most bytes on a device of each rank, `bound_s` a step time that no partition, placement and schedule of these units
    beats."""

    units: tuple[Unit, ...]
    cuts: tuple[int, ...]
    schedule: Schedule
    costs: tuple[StageCost, ...]
    simulation: Simulation
    peaks: tuple[int, ...]
    bound_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.simulation.step_time

    @property
    def peak_bytes(self) -> int:
        """Bytes on the fullest device."""
        return max(self.peaks)

    def over_bytes(self, limits: Sequence[int]) -> int:
        """Bytes by which some rank takes more than its limit, negative where none does."""
        return max(peak - limit for peak, limit in zip(self.peaks, limits, strict=True))

    def pipeline(self, reduce: Literal["step", "microbatch"] = "step") -> Pipeline:
        """As a plan writes it down; `reduce` says when gradients are reduced."""
        firsts = [self.units[at].first for at in (0, *self.cuts)]
        whole = self.simulation.makespan * self.schedule.ranks
        idle = sum(bubble.total for bubble in self.simulation.bubbles) / whole if whole else 0.0
        bubble = min(1.0, max(0.0, idle))
        return Pipeline.of(firsts, self.schedule, self.costs, reduce_gradients=reduce, bubble_fraction=bubble)


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What it takes to hand a micro-batch's values and gradients from a stage to the next one: seconds on the link, and
    those that the stages before and after it spend on them within their forward and backward."""

    send_s: float
    before_forward_s: float = 0.0
    before_backward_s: float = 0.0
    after_forward_s: float = 0.0
    after_backward_s: float = 0.0


def stage_units(
    units: Sequence[Unit],
    ranks: int,
    microbatches: int,
    *,
    send_s: Callable[[float], float],
    limits: Sequence[int],
    schedule: str = "auto",
    clock: Clock,
) -> Staged:
    """The fastest pipeline found in the time of `clock` within `limits`, bytes of a device of each
    pipeline rank, else the one of least memory.

    send_s     seconds of handing so many bytes to another pipeline rank
    schedule   auto, or a published one (see planner/zoo), for which the partition is balanced

    Infeasible if there are fewer units than stages.
    """
    _check(units, ranks, schedule)
    published = PUBLISHED if schedule == "auto" else (schedule,)
    found = list(published_stages(units, ranks, microbatches, published, send_s, skip=schedule == "auto"))
    bound = 0.0
    if schedule == "auto" and ranks > 1:
        searched, bound = _searched(units, ranks, microbatches, send_s, limits, clock)
        found += searched
    if all(one.over_bytes(limits) > 0 for one in found):
        found += _squeezed(units, microbatches, limits, schedule, send_s)
    best = min(found, key=lambda one: (max(0, one.over_bytes(limits)), one.step_s))
    best = _fused(best, send_s) if schedule == "auto" else best
    return Staged(
        units=best.units, cuts=best.cuts, schedule=best.schedule, costs=best.costs, simulation=best.simulation,
        peaks=best.peaks, bound_s=bound,
    )  # fmt: skip


def _fused(given: Staged, send_s: Callable[[float], float]) -> Staged:
    """The same with B in the place of I and W where that makes no step longer and no device fuller: of all
    micro-batches of a stage, or of those whose W comes right after I. That is one graph instead of two, with nothing
    kept between them."""
    best = given
    for stage in range(given.schedule.stages):
        for apart in (True, False):
            schedule = fused(best.schedule, stage, apart=apart)
            if schedule == best.schedule:
                continue
            other = staged(best.units, best.cuts, schedule, send_s)
            fuller = any(a > b for a, b in zip(other.peaks, best.peaks, strict=True))
            if other.step_s <= best.step_s * (1 + _EVEN) and not fuller:
                best = other
                break
    return best


def fused(schedule: Schedule, stage: int, *, apart: bool) -> Schedule:
    """`schedule` with I and W of `stage` as one B in the place of I: of all micro-batches (`apart`), or of those whose
    W comes right after."""
    rank = schedule.placement[stage]
    row = list(schedule.actions[rank])
    made: list[Action] = []
    done: set[int | None] = set()
    for at, action in enumerate(row):
        whole = Action(stage, "B", action.microbatch)
        after = row[at + 1] if at + 1 < len(row) else None
        if action.stage == stage and action.kind == "I" and (apart or after == replace(action, kind="W")):
            made.append(whole)
            done.add(action.microbatch)
        elif not (action.stage == stage and action.kind == "W" and action.microbatch in done):
            made.append(action)
    rows = tuple(tuple(made) if index == rank else other for index, other in enumerate(schedule.actions))
    return replace(schedule, actions=rows)


def restaged(units: Sequence[Unit], pipeline: Pipeline, send_s: Callable[[float], float]) -> Staged:
    """The stages of `pipeline`, each of which begins with one of `units`, in its places and by its schedule."""
    at = {unit.first: index for index, unit in enumerate(units)}
    cuts = [at[stage.first] for stage in pipeline.stages[1:]]
    return staged(units, cuts, pipeline.order, send_s)


def _check(units: Sequence[Unit], ranks: int, schedule: str) -> None:
    stages = ranks if schedule == "auto" else ranks * chunks_of(schedule)
    if len(units) < stages:
        raise Infeasible(
            f"'pipeline' must have at most as many stages as there are pieces to cut the model into, got {stages} for "
            f"{len(units)}; use fewer pipeline ranks"
        )


def published_stages(
    units: Sequence[Unit],
    ranks: int,
    microbatches: int,
    names: Sequence[str],
    send_s: Callable[[float], float],
    *,
    skip: bool,
) -> Iterator[Staged]:
    """Published schedules on stages of even time. Those that cannot be with these numbers are left out where `skip`
    says so, else RequestError."""
    for name in names:
        stages = ranks * chunks_of(name)
        if len(units) < stages:
            continue
        cuts = balanced_cuts([u.forward_s + u.input_s + u.weight_s for u in units], stages)
        assert cuts is not None
        parts = [[getattr(u, kind) for u in units] for kind in ("forward_s", "input_s", "weight_s")]
        mean = tuple(sum(part) / stages for part in parts)
        try:
            schedule = named_schedule(name, ranks, microbatches, costs=mean)  # type: ignore[arg-type]
        except RequestError:
            if not skip:
                raise
            continue
        yield staged(units, cuts, schedule, send_s)


def _searched(
    units: Sequence[Unit],
    ranks: int,
    microbatches: int,
    send_s: Callable[[float], float],
    limits: Sequence[int],
    clock: Clock,
) -> tuple[list[Staged], float]:
    """What the search over partition, placement and order finds, and its bound."""
    profile = LayerProfile(
        name="units",
        unit="microseconds",
        symbols="x" * len(units),
        costs=tuple((_SCALE * u.forward_s, _SCALE * u.input_s, _SCALE * u.weight_s) for u in units),
        layers=(1,) * len(units),
        memory=tuple(float(u.saved_bytes) for u in units),
        delay=_SCALE * max((send_s(u.sent_bytes) for u in units[:-1]), default=0.0),
    )
    found: list[Staged] = []
    held = sum(u.held_bytes for u in units) / ranks
    taken = held + max(_passing(u) for u in units)
    rooms = [limit - taken for limit in limits]
    bound = 0.0
    seconds = clock.left_s / _TRIES
    for attempt in range(_TRIES if min(rooms) > 0 else 0):
        until = Clock(limit_s=max(0.2, seconds))
        try:
            tuned = tune_profile(profile, ranks, microbatches, limits=rooms, clock=until, seed=attempt)
        except Infeasible:
            break
        assert tuned.cuts is not None
        found.append(staged(units, tuned.cuts, tuned.schedule, send_s))
        if attempt == 0:
            bound = tuned.lower_bound / _SCALE
        over = found[-1].over_bytes(limits)
        if over <= 0:
            break
        rooms = [room - 1.02 * over for room in rooms]
        if min(rooms) <= 0:
            break
    return found, bound


def _squeezed(
    units: Sequence[Unit], microbatches: int, limits: Sequence[int], schedule: str, send_s: Callable[[float], float]
) -> Iterator[Staged]:
    """One stage per rank, as many units in each as there is memory for: of such partitions the one that is most even.
    Schedules of one stage per rank save what at most `ranks - rank` micro-batches do."""
    ranks = len(limits)
    names = ("1f1b", "zb-h1") if schedule == "auto" else (schedule,)

    def fits(rank: int, piece: Sequence[Unit]) -> bool:
        return fits_rank(piece, min(ranks - rank, microbatches), limits[rank])

    seconds = [u.forward_s + u.input_s + u.weight_s for u in units]
    cuts = balanced_cuts(seconds, ranks, lambda rank, start, end: fits(rank, units[start:end]))
    for name in names if cuts is not None and chunks_of(names[0]) == 1 else ():
        assert cuts is not None
        mean = tuple(sum(getattr(u, k) for u in units) / ranks for k in ("forward_s", "input_s", "weight_s"))
        yield staged(units, cuts, named_schedule(name, ranks, microbatches, costs=mean), send_s)  # type: ignore[arg-type]


def fits_rank(piece: Sequence[Unit], saving: int, limit: int) -> bool:
    """Whether a stage of these units stays within `limit` bytes when it saves what `saving` micro-batches need."""
    held = sum(u.held_bytes for u in piece)
    saved = saving * sum(u.saved_bytes for u in piece)
    return held + max(sum(u.step_bytes for u in piece), saved + _most_passing(piece)) <= limit


def _passing(unit: Unit) -> int:
    """Bytes beside what is saved and held, within one action of the unit."""
    return max(0, unit.forward_bytes - unit.saved_bytes, unit.backward_bytes - unit.saved_bytes)


def staged(
    units: Sequence[Unit],
    cuts: Sequence[int],
    schedule: Schedule,
    send_s: Callable[[float], float],
    borders: Mapping[int, Border] | None = None,
) -> Staged:
    """The units in stages that begin at `cuts`, run by `schedule`. What the borders between stages take is `send_s` of
    the bytes, or what `borders` says, by the number of the stage before."""
    pieces = [units[a:b] for a, b in pairwise([0, *cuts, len(units)])]
    known = borders or {}
    between = [known.get(at) or Border(send_s=send_s(piece[-1].sent_bytes)) for at, piece in enumerate(pieces[:-1])]
    ends = [Border(send_s=0.0), *between, Border(send_s=0.0)]
    costs = tuple(_cost(piece, ends[at], ends[at + 1]) for at, piece in enumerate(pieces))
    simulation = simulate(schedule, planned_costs(costs))
    peaks = []
    for rank in range(schedule.ranks):
        mine = schedule.stages_of(rank)
        held = sum(costs[s].held_bytes for s in mine)
        step = sum(u.step_bytes for s in mine for u in pieces[s])
        passing = max(costs[s].passing_bytes for s in mine)
        peaks.append(held + max(step, round(simulation.peak_memory[rank]) + passing))
    return Staged(
        units=tuple(units),
        cuts=tuple(int(cut) for cut in cuts),
        schedule=schedule,
        costs=costs,
        simulation=simulation,
        peaks=tuple(peaks),
    )


def _cost(piece: Sequence[Unit], before: Border, after: Border) -> StageCost:
    """The cost of a stage of `piece` between two borders."""
    forward = before.after_forward_s + after.before_forward_s
    backward = before.after_backward_s + after.before_backward_s
    return StageCost(
        forward_s=sum(u.forward_s for u in piece) + forward,
        input_gradient_s=sum(u.input_s for u in piece) + backward,
        weight_gradient_s=sum(u.weight_s for u in piece),
        send_s=after.send_s,
        step_s=sum(u.step_s for u in piece),
        saved_bytes=sum(u.saved_bytes for u in piece),
        held_bytes=sum(u.held_bytes for u in piece),
        passing_bytes=_most_passing(piece),
    )


def _most_passing(piece: Sequence[Unit]) -> int:
    """Bytes beside what the stage holds and saves: in the forward what a unit passes; in the backward, from the last
    unit to the first, that and a gradient that is not added up yet, less what the units done had saved."""
    most, freed = max(max(0, u.forward_bytes - u.saved_bytes) for u in piece), 0
    for unit in reversed(piece):
        most = max(most, unit.backward_bytes - unit.saved_bytes + unit.fresh_bytes - freed)
        freed += unit.saved_bytes
    return most


def balanced_cuts(
    costs: Sequence[float], stages: int, fits: Callable[[int, int, int], bool] | None = None
) -> tuple[int, ...] | None:
    """Cuts of units in a row into `stages` pieces, none empty, whose largest sum is least; `fits` says whether a stage
    may be the units from one index to before another. None where no pieces fit."""
    return balanced_rows([costs] * stages, fits)


def balanced_rows(
    rows: Sequence[Sequence[float]], fits: Callable[[int, int, int], bool] | None = None
) -> tuple[int, ...] | None:
    """As `balanced_cuts`, where stage s costs what `rows[s]` says of its units."""
    stages, count = len(rows), len(rows[0])
    best = np.full((stages + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    come = np.zeros((stages + 1, count + 1), dtype=np.int64)
    for stage in range(1, stages + 1):
        total = np.concatenate([[0.0], np.cumsum(rows[stage - 1])])
        for end in range(stage, count + 1):
            starts = np.arange(stage - 1, end)
            worst = np.maximum(best[stage - 1, starts], total[end] - total[starts])
            if fits is not None:
                open_ = np.isfinite(worst)
                worst[open_] = [
                    w if fits(stage - 1, int(a), end) else np.inf
                    for w, a in zip(worst[open_], starts[open_], strict=True)
                ]
            at = int(np.argmin(worst))
            best[stage, end], come[stage, end] = worst[at], starts[at]
    if not np.isfinite(best[stages, count]):
        return None
    cuts: list[int] = []
    end = count
    for stage in range(stages, 1, -1):
        end = int(come[stage, end])
        cuts.append(end)
    return tuple(reversed(cuts))

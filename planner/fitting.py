"""The fastest plan that fits: searches under limits on what memory is estimated, until one fits by the count.

What a problem limits is an estimate (sharding/timeline.py); what a plan must fit is the count (sharding/memory.py)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ..plans.errors import Infeasible
from ..plans.meshes import Mesh
from .solver.least import costing
from .solver.problem import Solution, evaluate
from .solver.search import Progress, solve

if TYPE_CHECKING:
    from .api import Draft

__all__ = ["Known", "needs_no_count", "refuse_hopeless", "solve_within", "within_rooms"]

# How many solutions are counted before the request is given up.
_COUNTS = 10
# Plans met that are counted when none of the solutions fits.
_COUNTED = 24
# Searches after the time is up begin no later than this share of it: what was met is counted instead.
_GRACE = 1.25
# Seconds, at least, for counting them.
_LEAST_S = 5.0
# An estimate that is over the limit by this factor, or under it, needs no count.
_OVER, _UNDER = 1.1, 0.5
# Of how many moments the least memory is looked for, and how much more a limit's worth of bytes weighs there than time.
_MOMENTS, _WEIGHT = 3, 100.0


def needs_no_count(estimate: float, limit: float) -> bool:
    """Whether bytes of memory, as estimated, are so far under the limit that they fit by the count too."""
    return estimate <= _UNDER * limit


@dataclass(slots=True, kw_only=True, eq=False)
class Known:
    """What one search leaves to the next: moments that are worth a limit, prices of these limits, and plans."""

    moments: tuple[int, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    plans: Sequence[Sequence[int]] = ()


def solve_within(
    prepared: Draft,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    solver: str = "highs",
    on_progress: Progress | None = None,
    warm: Sequence[int] | None = None,
) -> Solution:
    """The best solution whose memory stays within the limit at every moment of the step, as counted.

    The first search has no limit, the next one keeps the estimate within it. A solution that does not fit by the count
    tells how far the estimate is off at each moment: by so much the limit on the estimate is moved there, and the
    problem is solved again; where that leaves no plan, by a share of it that is halved in on; at last the plans met on
    the way are counted. (An estimate far from the limit needs no count.) `warm` is a plan to start from. Raises
    Infeasible when none of the solutions fits, at once where the least that any plan is estimated to take is far over.
    """
    began = time.perf_counter()
    search = _Search(prepared=prepared, known=Known(plans=() if warm is None else (tuple(warm),)))
    least = prepared.timeline.least(prepared.formulation.problem)
    moment = int(np.argmax(least))
    refuse_hopeless(float(least[moment]), prepared.timeline.at(moment), prepared.limit, prepared.formulation.mesh)
    for _ in range(_COUNTS):
        spent = time.perf_counter() - began
        if search.free is not None and spent > _GRACE * time_limit_s:
            break
        left = max(1.0, time_limit_s - spent)
        try:
            solution = within_rooms(
                prepared, search.rooms, left, search.known, gap=gap, solver=solver, on_progress=on_progress
            )
        except Infeasible as error:
            if not search.failed(error):
                break
        else:
            if search.fits(solution):
                return search.told(solution, time.perf_counter() - began)
            if solution.status == "interrupted":
                raise KeyboardInterrupt
    if (small := search.smallest(max(_LEAST_S, time_limit_s / 4))) is not None:
        return search.told(small, time.perf_counter() - began)
    if (fitting := search.fitting(max(_LEAST_S, time_limit_s / 4))) is not None:
        return search.told(fitting, time.perf_counter() - began)
    raise search.infeasible()


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """How much room the estimate is given at each moment, and why.

    `missed` is by how much the estimate was too low, of which `share` is taken off the limit: too little at `low`,
    too much at `high`."""

    prepared: Draft
    known: Known
    rooms: np.ndarray = field(init=False)
    missed: np.ndarray = field(init=False)
    free: Solution | None = None
    share: float = 1.0
    low: float = 0.0
    high: float = math.inf
    over: int = 0
    error: Infeasible | None = None
    met: dict[tuple[int, ...], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        moments = self.prepared.timeline.end + 1
        self.rooms, self.missed = np.full(moments, math.inf), np.zeros(moments)

    def fits(self, solution: Solution) -> bool:
        """Whether a solution fits by the count; where it does not, the next search gets less room."""
        prepared, limit = self.prepared, float(self.prepared.limit)
        first, self.free = self.free is None, self.free or solution
        profile = prepared.timeline.profile(solution.choices)
        estimate = float(profile.max())
        if needs_no_count(estimate, limit):
            return True
        self.met.update(dict.fromkeys((solution.choices, *solution.others)))
        if first and estimate > _OVER * limit:
            # How far off the estimate of this plan is says little about those that come near the limit.
            self.rooms = np.full(len(self.rooms), limit)
            self.known.moments = tuple(_overfull(profile - self.rooms))
            return False
        used = prepared.write(solution).predicted.memory.peak_bytes
        if used <= limit:
            return True
        self.over, self.error = used - int(limit), None
        # Two plans that are over at different moments must not take turns.
        seen = prepared.missed(solution)
        # Where the count is fullest at a moment that the timeline does not have, the others stand for it: with their
        # rooms as before the same solution would come again.
        seen = seen + max(0.0, used - float((profile + seen).max()))
        self.missed = seen if first or not self.missed.any() else np.maximum(self.missed, seen)
        self.low = self.share if math.isfinite(self.high) else 0.0
        self._share()
        return False

    def failed(self, error: Infeasible) -> bool:
        """Take that the rooms leave no plan; whether others may."""
        self.error = error
        limit = float(self.prepared.limit)
        if not self.missed.any() and self.free is not None:
            # The estimate may be too high as well.
            self.prepared.write(self.free)
            self.missed = np.minimum(self.prepared.missed(self.free), 0.0)
            self.rooms = limit - self.missed
            return bool((self.missed < -0.002 * limit).any())
        if not (self.missed > 0.002 * limit).any():
            return False
        self.high = self.share
        self._share()
        return True

    def _share(self) -> None:
        self.share = (self.low + self.high) / 2 if math.isfinite(self.high) else 1.0
        self.rooms = float(self.prepared.limit) - self.share * self.missed

    def smallest(self, seconds_left: float) -> Solution | None:
        """A plan that fits by the count where the estimate hides those that do: the one of least memory as estimated,
        at the moments at which that is most, then the fastest that is estimated to take no more than it."""
        if self.free is None:
            return None
        prepared, limit = self.prepared, float(self.prepared.limit)
        until = time.perf_counter() + seconds_left
        moment = int(np.argmax(prepared.timeline.profile(self.free.choices)))
        for _ in range(_MOMENTS):
            left = until - time.perf_counter()
            if left <= 0:
                return None
            row = prepared.timeline.row(moment, math.inf)
            unit = limit / (_WEIGHT * max(self.free.objective_s, 1e-9))
            problem = costing(prepared.formulation.problem, row, unit)
            least = solve(replace(problem, rows=()), time_limit_s=left, gap=1e-3)
            profile = prepared.timeline.profile(least.choices)
            self.met.setdefault(least.choices)
            if self._counted(least.choices) <= limit:
                return self._no_larger(least.choices, np.maximum(profile, limit), until)
            if int(np.argmax(profile)) == moment:
                return None
            moment = int(np.argmax(profile))
        return None

    def _no_larger(self, small: tuple[int, ...], rooms: np.ndarray, until: float) -> Solution:
        """The fastest plan that is estimated to stay within `rooms`, or else the plan `small`, which fits."""
        assert self.free is not None
        left = until - time.perf_counter()
        try:
            known = Known(plans=(small,))
            found = within_rooms(self.prepared, rooms, left, known) if left > 1.0 else None
        except Infeasible:
            found = None
        if found is None or self._counted(found.choices) > self.prepared.limit:
            return self._as_found(small)
        return replace(found, gap=self._gap(found.objective_s), status="feasible")

    def _counted(self, choices: tuple[int, ...]) -> int:
        return self.prepared.write(self._as_found(choices)).predicted.memory.peak_bytes

    def _gap(self, seconds: float) -> float:
        assert self.free is not None
        return max(0.0, seconds - self.free.bound_s) / seconds

    def _as_found(self, choices: tuple[int, ...]) -> Solution:
        """The plan `choices` as a solution; its gap is to the bound of the search without limit."""
        assert self.free is not None
        seconds = evaluate(self.prepared.formulation.problem, choices)
        gap = self._gap(seconds)
        return replace(self.free, choices=choices, objective_s=seconds, gap=gap, status="feasible", others=())

    def fitting(self, seconds_left: float) -> Solution | None:
        """The fastest of the plans met that fits by the count, as far as they are counted in so many seconds; its gap
        is to the bound of the search without limit."""
        if self.free is None:
            return None
        until = time.perf_counter() + seconds_left
        problem, limit = self.prepared.formulation.problem, self.prepared.limit
        seconds = {plan: evaluate(problem, plan) for plan in self.met}
        for plan in sorted(seconds, key=seconds.__getitem__)[:_COUNTED]:
            if time.perf_counter() > until:
                break
            if self._counted(plan) <= limit:
                return self._as_found(plan)
        return None

    def told(self, solution: Solution, seconds: float) -> Solution:
        """`solution` with all the time that it took, and what there is without a limit."""
        assert self.free is not None
        return replace(solution, seconds=seconds, free_s=self.free.bound_s)

    def infeasible(self) -> Infeasible:
        """Why nothing fits."""
        reason = self.error or f"the plan found last takes {self.over} bytes too much, as counted"
        found = _infeasible(str(reason), self.prepared.limit, self.prepared.formulation.mesh)
        found.__cause__ = self.error
        return found


def refuse_hopeless(least: float, at: str, limit: float, mesh: Mesh) -> None:
    """Raise Infeasible where the `least` bytes that are estimated of any plan, at the moment `at`, are far over."""
    if least > _OVER * limit:
        reason = f"'memory at {at}' must stay at or under {limit:.6g}, got {least:.6g} at least"
        raise _infeasible(f"{reason}, {least - limit:.6g} too much: no plan needs less", limit, mesh)


def _infeasible(reason: str, limit: float, mesh: Mesh) -> Infeasible:
    return Infeasible(
        f"'memory_limit_bytes' and 'constraints' must leave a plan, got a memory limit of {limit:.0f} bytes per device "
        f"on mesh {mesh}: {reason}; use more devices, a smaller batch or a higher limit, or drop constraints"
    )


def within_rooms(
    prepared: Draft,
    rooms: np.ndarray,
    time_limit_s: float,
    known: Known | None = None,
    *,
    gap: float = 1e-3,
    solver: str = "highs",
    on_progress: Progress | None = None,
) -> Solution:
    """The best solution whose estimated memory stays within `rooms` bytes, one figure per moment of the timeline.
    `known` is what searches leave to the next one, also those that find no plan.

    Rows of the moments that a solution would overfill are added until none is: the last solution is optimal among those
    that fit, because it is optimal for a part of the limits and meets them all.
    """
    timeline, began, bound = prepared.timeline, time.perf_counter(), -math.inf
    known = known or Known()
    moments = tuple(moment for moment in known.moments if math.isfinite(rooms[moment]))
    while True:
        left = max(1.0, time_limit_s - (time.perf_counter() - began))
        rows = tuple(timeline.row(moment, float(rooms[moment])) for moment in moments)
        # Before any limit is known to bind, most of the time is kept for the search that meets them.
        solution = solve(
            replace(prepared.formulation.problem, rows=rows),
            time_limit_s=left if moments else 0.4 * left,
            gap=gap,
            solver=solver,
            on_progress=on_progress,
            warm=known.plans,
            bound=bound,
            prices=known.prices,
        )
        over = _overfull(timeline.profile(solution.choices) - rooms)
        if over and solution.status == "interrupted":
            raise KeyboardInterrupt
        known.moments = tuple(sorted({*known.moments, *over}))
        known.prices = {**known.prices, **solution.prices}
        known.plans = (solution.choices, *solution.others)
        if set(over) <= set(moments):
            return solution
        # With more limits no plan gets faster.
        moments, bound = known.moments, solution.bound_s


def _overfull(over: np.ndarray) -> list[int]:
    """The worst moment of the forward, of the backward and of the whole step, where they are over the limit."""
    half = len(over) // 2
    worst = {
        int(np.argmax(over)),
        int(np.argmax(over[:half])) if half else 0,
        half + int(np.argmax(over[half:])),
        len(over) - 1,
    }
    return sorted(moment for moment in worst if over[moment] > 0)

"""Partition, placement and schedule of a layer profile, searched together and anytime."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...cost_models.pipeline import simulate
from ...cost_models.pipeline.arrays import Arrays, orders_of, schedule_of
from ...plans import Infeasible, RequestError, Schedule
from ..zoo import chunks_of, loop_placement, named_schedule, v_placement
from .fixed import split
from .listing import ListScratch, list_orders
from .orders import Clock, Orders
from .plans import anneal_plans
from .polish import polish
from .profile_bounds import profile_bound
from .profiles import LayerProfile, equal_cuts
from .result import Tuned

__all__ = ["tune_profile"]

_ZOO = ("1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
_STAGES_PER_RANK = (1, 1.5, 2, 3, 4)
# How many drafts go on (0: all), how often each is run, the share of the time, and the temperature as a share of the
# bound: where memory is short, and where there is no limit.
_ROUNDS_LIMITED = ((0, 1, 0.3, 0.004), (4, 2, 0.4, 0.006), (2, 2, 0.3, 0.003))
_ROUNDS_FREE = ((0, 1, 0.15, 0.006), (4, 2, 0.4, 0.01), (3, 2, 0.45, 0.006))
# Orders of their own pay where memory is short (without a limit the lists are nearly as good) and moves are cheap: the
# share of the time that they get at most, and the actions for which they get that much.
_POLISH_LIMITED, _POLISH_FREE, _POLISH_ACTIONS = 0.6, 0.2, 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """What the search is given, once as arrays."""

    profile: LayerProfile
    ranks: int
    microbatches: int
    overhead: float
    prefix: np.ndarray
    delays: np.ndarray
    limits: np.ndarray
    bound: float
    seed: int

    @property
    def limited(self) -> bool:
        """Whether every rank has a memory limit."""
        return bool(np.isfinite(self.limits).all())

    def arrays(self, cuts: Sequence[int], placement: Sequence[int]) -> Arrays:
        """Costs of the stages that `cuts` make on the ranks of `placement`."""
        costs = self.profile.stage_costs([int(cut) for cut in cuts], overhead=self.overhead)
        return Arrays.of(costs, [int(rank) for rank in placement], self.ranks, self.microbatches, self.limits.tolist())


@dataclass(slots=True, kw_only=True)
class _Draft:
    """Cuts, placement and the rule of a list schedule, with the step time that they reach."""

    cuts: np.ndarray
    place: np.ndarray
    urgency: np.ndarray
    window: np.ndarray
    knobs: np.ndarray
    step: float = math.inf


def tune_profile(
    profile: LayerProfile,
    ranks: int,
    microbatches: int,
    *,
    limits: Sequence[float] | None = None,
    overhead: float = 0.0,
    clock: Clock,
    seed: int = 0,
) -> Tuned:
    """The best plan found in the time of `clock`: at least as good as every published schedule that fits.

    Infeasible if there are fewer units than ranks, or if the ranks together cannot hold one micro-batch.
    """
    _check(profile, ranks, limits)
    given = [math.inf] * ranks if limits is None else list(limits)
    step = _step(profile)
    exact = _multiples(profile, step)
    problem = _Problem(
        profile=exact,
        ranks=ranks,
        microbatches=microbatches,
        overhead=round(overhead / step) * step,
        prefix=_prefix(exact),
        delays=np.full(profile.units, exact.delay),
        limits=np.array(given) + 1e-9,
        bound=profile_bound(profile, ranks, microbatches, limits=limits, seconds=max(0.3, 0.1 * clock.limit_s)),
        seed=seed,
    )
    best, progress = _search(problem, clock)
    schedule = schedule_of(best.word, best.first, best.arrays.place.tolist(), microbatches)
    cuts = tuple(int(cut) for cut in best.cuts)
    costs = profile.stage_costs(cuts, overhead=overhead)
    return Tuned(
        schedule=schedule,
        costs=costs,
        simulation=simulate(schedule, costs),
        lower_bound=problem.bound,
        limits=None if limits is None else tuple(limits),
        cuts=cuts,
        progress=tuple(progress),
        search_cpu_s=clock.spent_s,
    )


def _check(profile: LayerProfile, ranks: int, limits: Sequence[float] | None) -> None:
    if profile.units < ranks:
        raise Infeasible(
            f"'pp' must be at most the {profile.units} layers, embedding and head, got {ranks}; use fewer ranks"
        )
    held = math.fsum(profile.memory)
    if limits is not None and held > sum(limits) + 1e-9:
        raise Infeasible(
            f"'memory' must hold one micro-batch on all ranks together, got {sum(limits):g} where {held:g} are needed,"
            f" {held - sum(limits):g} more; raise it or use more ranks"
        )


def _prefix(profile: LayerProfile) -> np.ndarray:
    """Sums of F, I, W and memory before each unit, 4 x (units + 1)."""
    rows = np.array([[*cost, held] for cost, held in zip(profile.costs, profile.memory, strict=True)])
    return np.concatenate([np.zeros((1, 4)), np.cumsum(rows, axis=0)]).T.copy()


def _step(profile: LayerProfile) -> float:
    """A power of two of which sums of times of the whole search are exact: what ends together then compares as equal,
    in whichever order it was added.
    """
    total = math.fsum(map(sum, profile.costs)) + profile.delay
    return 2.0 ** (math.ceil(math.log2(total)) - 40) if total > 0 else 1.0


def _multiples(profile: LayerProfile, step: float) -> LayerProfile:
    """The profile with its times rounded to multiples of `step`."""
    costs = tuple((round(f / step) * step, round(i / step) * step, round(w / step) * step) for f, i, w in profile.costs)
    return replace(profile, costs=costs, delay=round(profile.delay / step) * step)


class _Best:
    """The best solution so far and when it was found."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.orders: Orders | None = None
        self.progress: list[tuple[float, float]] = []

    def take(self, found: Orders | None) -> None:
        if found is None or (self.orders is not None and found.value >= self.orders.value):
            return
        if self.orders is None or found.step < self.orders.step:
            self.progress.append((self.clock.spent_s, found.step))
        self.orders = found

    @property
    def step(self) -> float:
        return math.inf if self.orders is None else self.orders.step


def _search(problem: _Problem, clock: Clock) -> tuple[Orders, list[tuple[float, float]]]:
    best = _Best(clock)
    candidates: list[Orders] = []
    for orders in _published(problem):
        best.take(orders)
        candidates.append(orders)
    pool = list(_drafts(problem))
    budget = max(0.0, clock.left_s) * (1 - _polish_share(problem))
    # All kinds of drafts for a short time, the best of them anew and for longer, the very best cooler; then orders.
    for round_, (keep, repeats, share, heat) in enumerate(_ROUNDS_LIMITED if problem.limited else _ROUNDS_FREE):
        pool = sorted(pool, key=lambda draft: draft.step)[: keep or len(pool)]
        runs = [(draft, repeat) for repeat in range(repeats) for draft in pool]
        until = clock.left_s - share * budget
        grown: list[_Draft] = []
        for index, (draft, repeat) in enumerate(runs):
            seconds = (clock.left_s - until) / (len(runs) - index)
            if best.step <= problem.bound * (1 + 1e-9) or seconds <= 0:
                break
            grown.append(_annealed(problem, draft, heat, seconds, clock, seed=97 * round_ + repeat))
            found = _orders_of(problem, grown[-1])
            best.take(found)
            candidates += [] if found is None else [found]
        pool += grown
    candidates += [] if best.orders is None else [best.orders]
    polish(
        candidates,
        best.take,
        prefix=problem.prefix,
        overhead=problem.overhead,
        target=problem.bound * (1 + 1e-9),
        clock=clock,
        seed=problem.seed,
    )
    if best.orders is None:
        raise Infeasible(
            "'memory' must let some partition keep one micro-batch of each rank, got none that does; raise it"
        )
    return best.orders, best.progress


def _polish_share(problem: _Problem) -> float:
    """Which share of the time goes to orders of their own."""
    most = _POLISH_LIMITED if problem.limited else _POLISH_FREE
    return most * min(1.0, _POLISH_ACTIONS / (6 * problem.ranks * problem.microbatches))


def _published(problem: _Problem) -> Iterator[Orders]:
    """The published schedules on equal layers, as far as they are defined and fit."""
    profile, ranks = problem.profile, problem.ranks
    for name in _ZOO:
        try:
            cuts = equal_cuts(profile, ranks * chunks_of(name))
            costs = profile.stage_costs(cuts)
            parts = (costs.forward, costs.input_gradient, costs.weight_gradient)
            forward, inputs, weights = (sum(part) / costs.stages for part in parts)
            schedule = named_schedule(
                name, ranks, problem.microbatches, costs=(forward, inputs, weights), delay=profile.delay
            )
        except RequestError:
            continue
        yield from _as_orders(problem, schedule, cuts)


def _as_orders(problem: _Problem, schedule: Schedule, cuts: Sequence[int]) -> Iterator[Orders]:
    arrays = problem.arrays(cuts, schedule.placement)
    for variant in (schedule, split(schedule)):
        found = Orders.of(arrays, *orders_of(variant), cuts)
        if found is not None:
            yield found


def _drafts(problem: _Problem) -> Iterator[_Draft]:
    """Stage counts from the number of ranks to four times it, once around and forth and back, of about equal cost."""
    ranks, units = problem.ranks, problem.profile.units
    counts = sorted({min(units, round(ranks * share)) for share in _STAGES_PER_RANK})
    for stages in counts:
        cuts = _even_cuts(problem, stages)
        chunks = -(-stages // ranks)
        for placement in {loop_placement(ranks, chunks)[:stages], v_placement(ranks, chunks)[:stages]}:
            yield _Draft(
                cuts=cuts.copy(),
                place=np.array(placement, np.int64),
                urgency=np.concatenate([np.zeros(stages), np.full(stages, -2.0)]),
                window=np.full(stages, problem.microbatches, np.int64),
                knobs=np.array([0.5, 0.2]),
            )


def _even_cuts(problem: _Problem, stages: int) -> np.ndarray:
    """Cuts into stages of about the same time, each of at least one unit."""
    sums = problem.prefix[:3].sum(axis=0)
    units = problem.profile.units
    cuts: list[int] = []
    for stage in range(1, stages):
        cut = int(np.searchsorted(sums, sums[-1] * stage / stages))
        low = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(cut, low), units - (stages - stage)))
    return np.array(cuts, np.int64)


def _annealed(problem: _Problem, draft: _Draft, heat: float, seconds: float, clock: Clock, *, seed: int) -> _Draft:
    """The best of an annealing run of about so many seconds from `draft`."""
    stages = len(draft.place)
    plan = [draft.cuts, draft.place, draft.urgency, draft.window, draft.knobs]
    until = clock.spent_s + seconds
    # A short run says how long a move takes, and may find something itself.
    found, moves = draft, 200
    for pass_ in range(2):
        begin = clock.spent_s
        best = [part.copy() for part in plan]
        step = anneal_plans(
            *(part.copy() for part in plan),
            problem.prefix,
            problem.overhead,
            problem.delays,
            problem.limits,
            np.zeros(problem.ranks),
            problem.microbatches,
            moves,
            heat * problem.bound,
            0.05 * heat * problem.bound,
            np.array([_state(problem.seed, seed, pass_)], np.int64),
            *best,
            *(part.copy() for part in best[:4]),
            np.zeros(4 * stages),
            np.zeros(4 * stages),
            np.zeros(stages),
            np.zeros(stages),
            np.zeros(problem.ranks),
            *ListScratch.of(problem.ranks, stages, problem.microbatches).parts(),
        )
        if step < found.step:
            found = _Draft(cuts=best[0], place=best[1], urgency=best[2], window=best[3], knobs=best[4], step=step)
        each = max(clock.spent_s - begin, 1e-6) / moves
        moves = int((until - clock.spent_s) / each)
        if moves < 100:
            break
    return found


def _state(*seeds: int) -> int:
    """A start of the random numbers, not zero and below 2 ** 62."""
    value = 88172645463325252
    for seed in seeds:
        value = (value * 6364136223846793005 + seed * 1442695040888963407 + 1) % (1 << 62)
    return value | 1


def _orders_of(problem: _Problem, draft: _Draft) -> Orders | None:
    if draft.step == math.inf:
        return None
    arrays = problem.arrays(draft.cuts.tolist(), draft.place.tolist())
    scratch = ListScratch.of(problem.ranks, arrays.stages, problem.microbatches)
    list_orders(
        arrays.place,
        arrays.duration,
        arrays.memory,
        arrays.lag_forward,
        arrays.lag_backward,
        arrays.limits,
        arrays.finish,
        problem.microbatches,
        draft.urgency,
        draft.window,
        float(draft.knobs[0]),
        math.inf,
        *scratch.parts(),
    )
    return scratch.orders(arrays, draft.cuts)

"""Schedules for stages that are fixed on their ranks: only the order of F, I and W is chosen, under a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np

from ...cost_models.pipeline import StageCosts, simulate
from ...cost_models.pipeline.arrays import Arrays, orders_of, schedule_of
from ...plans import Infeasible, RequestError, Schedule
from ..zoo import interleaved, one_f_one_b, v_half, v_min, zb_h1, zb_h2, zb_v
from .bounds import fixed_stages_bound, whole_numbers
from .listing import list_schedules
from .orders import Clock, Orders, improve
from .refute import raised_bound
from .result import Tuned

__all__ = ["split", "tune_orders"]

# Actions evaluated per second, before the first run says; and in each search for shorter spans.
_RATE = 5e7
_SPAN_MOVES = 1e7
# The most actions on a rank for which deadlines are refuted: it takes their number squared.
_REFUTED_ACTIONS = 400
_HEAT = (0.01, 0.004, 0.002, 0.02)


def tune_orders(
    costs: StageCosts,
    placement: Sequence[int],
    ranks: int,
    microbatches: int,
    *,
    limits: Sequence[float] | None = None,
    clock: Clock,
    seed: int = 0,
) -> Tuned:
    """The best order found in the time of `clock`; it ends sooner where the bound is reached.

    Infeasible if a rank cannot hold one micro-batch of its stages.
    """
    costs = costs.complete()
    if costs.microbatch_scale or costs.blocking or not costs.overlap:
        raise RequestError(
            "'costs' must have equal micro-batches and overlapping transfers for a search, got others; simulate them"
        )
    _check_limits(costs, placement, limits)
    bound = fixed_stages_bound(costs, placement, microbatches, limits)
    arrays = Arrays.of(costs, placement, ranks, microbatches, limits)
    starts = sorted(_starts(arrays, placement, ranks, costs), key=lambda orders: orders.value)
    raised = _Raised(costs, placement, microbatches, limits, bound)
    best, progress = _search(starts, raised, clock, seed)
    schedule = schedule_of(best.word, best.first, placement, microbatches)
    return Tuned(
        schedule=schedule,
        costs=costs,
        simulation=simulate(schedule, costs),
        lower_bound=raised.bound,
        limits=None if limits is None else tuple(limits),
        cuts=None,
        progress=tuple(progress),
        search_cpu_s=clock.spent_s,
    )


class _Raised:
    """The bound, raised from time to time by refuting deadlines below the best that was found."""

    def __init__(
        self,
        costs: StageCosts,
        placement: Sequence[int],
        microbatches: int,
        limits: Sequence[float] | None,
        bound: float,
    ) -> None:
        self.problem = (costs, placement, microbatches, limits)
        self.bound = bound
        self.tried = math.inf
        self.step = 1.0 if whole_numbers(costs) else 0.0
        stages = [list(placement).count(rank) for rank in set(placement)]
        self.useful = not any(costs.finish) and 3 * microbatches * max(stages) <= _REFUTED_ACTIONS

    def try_below(self, reached: float) -> None:
        """Raise the bound towards `reached`, if that has not been tried."""
        if self.useful and self.bound < reached < self.tried:
            self.tried = reached
            self.bound = max(self.bound, raised_bound(*self.problem, self.bound, reached, self.step))


def _search(starts: list[Orders], raised: _Raised, clock: Clock, seed: int) -> tuple[Orders, list[tuple[float, float]]]:
    """Annealing runs from the best so far and, every fourth time, from another start; then the ranks' spans."""
    best = starts[0]
    progress = [(clock.spent_s, best.step)]
    size = len(best.word)
    rate = 0.0
    for round_ in count():
        if round_ in (0, 1) or round_ % 4 == 0 or clock.left_s <= 0:
            raised.try_below(best.step)
        if best.step <= raised.bound * (1 + 1e-5 * (raised.step == 0) + 1e-9) or clock.left_s <= 0:
            break
        begin = clock.spent_s
        # The first round is short: it compiles, and says how fast this machine is.
        seconds = min(clock.left_s, 0.3 * 2 ** min(round_ // 4, 2))
        iterations = max(1000, int(seconds * rate / size))
        origin = best if round_ % 4 else starts[round_ // 4 % len(starts)]
        hot = _HEAT[round_ % len(_HEAT)]
        found = improve(origin, iterations, hot=hot, cold=hot * 0.02, seed=seed + round_, target=raised.bound)
        rate = _RATE if round_ == 0 else iterations * size / max(clock.spent_s - begin, 1e-6)
        if found.value < best.value:
            if found.step < best.step:
                progress.append((clock.spent_s, found.step))
            best = found
    return _shorten_spans(best, clock, seed), progress


def _shorten_spans(best: Orders, clock: Clock, seed: int) -> Orders:
    """The same step time with the longest span of a rank shorter, where a short search finds it."""
    arrays = best.arrays
    work = np.zeros(len(best.first) - 1)
    for rank in range(len(work)):
        work[rank] = arrays.duration[best.word[best.first[rank] : best.first[rank + 1]]].sum()
    for round_ in range(4):
        if best.span <= work.max() * (1 + 1e-9) or clock.left_s <= 0:
            break
        iterations = int(_SPAN_MOVES / len(best.word))
        found = improve(best, iterations, hot=0.005, cold=0.0002, seed=seed + 1000 + round_, span_weight=1.0)
        if found.step <= best.step and found.span < best.span:
            best = found
    return best


def _check_limits(costs: StageCosts, placement: Sequence[int], limits: Sequence[float] | None) -> None:
    if limits is None:
        return
    for rank, limit in enumerate(limits):
        need = sum(costs.memory_forward[stage] for stage, place in enumerate(placement) if place == rank)
        if need > limit + 1e-9:
            raise Infeasible(
                f"'memory' must hold one micro-batch on every rank, got {limit:g} where rank {rank}"
                f" needs {need:g}, {need - limit:g} more;"
                " give it more memory or fewer layers"
            )


def _starts(arrays: Arrays, placement: Sequence[int], ranks: int, costs: StageCosts) -> Iterator[Orders]:
    """Published schedules of this placement that fit, with B split into I and W, and a list schedule."""
    for make in _generators(placement, ranks, arrays.microbatches, costs):
        try:
            word, first = orders_of(split(make()))
        except RequestError:
            # The rule is not defined for these counts.
            continue
        found = Orders.of(arrays, word, first)
        if found is not None:
            yield found
    yield from list_schedules(arrays, ranks, np.zeros(0, np.int64))


def _generators(
    placement: Sequence[int], ranks: int, microbatches: int, costs: StageCosts
) -> list[Callable[[], Schedule]]:
    stages = len(placement)
    chunks = stages // ranks
    mean = tuple(sum(part) / stages for part in (costs.forward, costs.input_gradient, costs.weight_gradient))
    makers: list[Callable[[], Schedule]] = []
    if list(placement) == list(range(ranks)):
        makers = [
            lambda: zb_h1(ranks, microbatches),
            lambda: zb_h2(ranks, microbatches),
            lambda: one_f_one_b(ranks, microbatches),
        ]
    elif list(placement) == list(range(ranks)) * chunks:
        makers = [lambda: interleaved(ranks, microbatches, chunks)]
    elif list(placement) == [*range(ranks), *reversed(range(ranks))]:
        greedy = (mean[0], mean[1], mean[2])
        makers = [
            lambda: zb_v(ranks, microbatches, costs=greedy, delay=costs.delay),
            lambda: v_half(ranks, microbatches),
            lambda: v_min(ranks, microbatches),
        ]
    return makers


def split(schedule: Schedule) -> Schedule:
    """The same with every B as an I and a W right after it."""
    from ...plans import Action

    rows = (
        tuple(
            Action(action.stage, kind, action.microbatch)
            for action in row
            for kind in (("I", "W") if action.kind == "B" else (action.kind,))
        )
        for row in schedule.actions
    )
    return Schedule(microbatches=schedule.microbatches, placement=schedule.placement, actions=tuple(rows))

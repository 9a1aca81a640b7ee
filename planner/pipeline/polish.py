"""Better orders and cuts for the best plans of a search: annealing runs, the plans that do not keep up left out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .orders import Clock, Orders, improve

__all__ = ["polish"]

# How many plans go on, the share of the time, and the temperature as a share of the step time.
_ROUNDS = ((6, 0.35, 0.006), (3, 0.4, 0.008), (1, 0.25, 0.003))
_CUT_SHARE, _MEAN_WEIGHT = 0.1, 0.3
# Actions evaluated per second and moves of the first run, which says more.
_RATE, _FIRST = 5e7, 500


def polish(
    plans: list[Orders],
    take: Callable[[Orders], None],
    *,
    prefix: np.ndarray,
    overhead: float,
    target: float,
    clock: Clock,
    seed: int,
) -> None:
    """Hand what is found to `take` until the time of `clock` is up or a step time is at most `target`.

    prefix: sums of F, I, W and memory before each unit, 4 x (units + 1).
    """
    budget, rate = clock.left_s, 0.0
    for round_, (keep, share, heat) in enumerate(_ROUNDS):
        plans = _best_of(plans, keep)
        until = clock.left_s - share * budget
        for index, plan in enumerate(plans):
            size = len(plan.word)
            begin = clock.spent_s
            seconds = (clock.left_s - until) / (len(plans) - index)
            if seconds <= 0 or plan.step <= target:
                return
            moves = max(_FIRST, int(seconds * rate / size))
            found = improve(
                plan,
                moves,
                hot=heat,
                cold=heat * 0.02,
                seed=seed + 31 * round_ + index,
                target=target,
                prefix=prefix,
                overhead=overhead,
                cut_share=_CUT_SHARE,
                mean_weight=_MEAN_WEIGHT,
            )
            rate = moves * size / max(clock.spent_s - begin, 1e-6) if rate else _RATE
            if found.value < plan.value:
                plans[index] = found
                take(found)


def _best_of(plans: list[Orders], keep: int) -> list[Orders]:
    """The best plans, of those with the same ranks of the stages one."""
    chosen: list[Orders] = []
    seen: set[tuple[int, ...]] = set()
    for plan in sorted(plans, key=lambda plan: plan.value):
        key = tuple(plan.arrays.place.tolist())
        if key not in seen:
            seen.add(key)
            chosen.append(plan)
    return chosen[:keep]

"""Search over the orders of given stages on given ranks, anytime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...cost_models.pipeline.arrays import Arrays
from ...cost_models.pipeline.kernel import Scratch
from .anneal import anneal_orders

__all__ = ["Clock", "Orders", "improve"]

_SPAN_WEIGHT = 1e-4


@dataclass(slots=True)
class Clock:
    """CPU seconds of this process until a limit; `begin` counts what was spent before."""

    limit_s: float
    begin_s: float = field(default_factory=time.process_time)

    @property
    def spent_s(self) -> float:
        """CPU seconds since the beginning."""
        return time.process_time() - self.begin_s

    @property
    def left_s(self) -> float:
        """CPU seconds until the limit."""
        return self.limit_s - self.spent_s


@dataclass(slots=True, kw_only=True)
class Orders:
    """A solution under search: orders, cuts (none where the stages are fixed), and the times they reach."""

    arrays: Arrays
    word: np.ndarray
    first: np.ndarray
    cuts: np.ndarray
    step: float
    span: float

    @property
    def value(self) -> float:
        """What the search makes smaller: the step time, and of equal ones the longest span of a rank."""
        return self.step + _SPAN_WEIGHT * self.span

    @classmethod
    def of(cls, arrays: Arrays, word: np.ndarray, first: np.ndarray, cuts: Sequence[int] = ()) -> Orders | None:
        """The solution with these orders, None if they stand still or need too much memory."""
        start = arrays.starts(word, first)
        if start is None or not arrays.fits(word, first):
            return None
        ranks = range(len(first) - 1)
        ends = [
            start[first[r + 1] - 1] + arrays.duration[word[first[r + 1] - 1]] for r in ranks if first[r] < first[r + 1]
        ]
        begins = [start[first[r]] for r in ranks if first[r] < first[r + 1]]
        finish = [arrays.finish[r] for r in ranks if first[r] < first[r + 1]]
        return cls(
            arrays=arrays,
            word=word,
            first=first,
            cuts=np.array(cuts, np.int64),
            step=float(max(end + more for end, more in zip(ends, finish, strict=True))),
            span=float(max(end - begin for end, begin in zip(ends, begins, strict=True))),
        )


def improve(
    orders: Orders,
    iterations: int,
    *,
    hot: float,
    cold: float,
    seed: int,
    target: float = 0.0,
    span_weight: float = _SPAN_WEIGHT,
    mean_weight: float = 0.0,
    prefix: np.ndarray | None = None,
    overhead: float = 0.0,
    cut_share: float = 0.0,
) -> Orders:
    """The best of an annealing run from `orders`; temperatures are shares of its step time.

    With `prefix`, the sums of F, I, W and memory before each unit, cuts move too.
    """
    given = orders.arrays
    arrays = Arrays(
        place=given.place,
        duration=given.duration.copy(),
        memory=given.memory.copy(),
        lag_forward=given.lag_forward,
        lag_backward=given.lag_backward,
        limits=given.limits,
        finish=given.finish,
        microbatches=given.microbatches,
    )
    stages, size = arrays.stages, len(orders.word)
    word, cuts = orders.word.copy(), orders.cuts.copy()
    best, best_cuts = word.copy(), cuts.copy()
    result = np.array([orders.step, orders.span, orders.step, orders.span])
    table = np.zeros((4, 1)) if prefix is None else prefix
    anneal_orders(
        word,
        orders.first,
        arrays.place,
        arrays.duration,
        arrays.memory,
        arrays.lag_forward,
        arrays.lag_backward,
        arrays.limits,
        arrays.finish,
        arrays.microbatches,
        cuts,
        table,
        overhead,
        cut_share if prefix is not None and stages > 1 else 0.0,
        iterations,
        hot * orders.step,
        cold * orders.step,
        span_weight,
        mean_weight,
        target,
        np.array([(seed * 2654435761 + 88172645463325252) % (1 << 62) | 1], np.int64),
        best,
        best_cuts,
        result,
        np.empty(size),
        np.zeros(size, np.int64),
        *Scratch.of(len(orders.first) - 1, stages, arrays.microbatches).parts(),
        np.zeros(4 * stages, np.int64),
        np.empty(size, np.int64),
        np.empty(2 * stages * arrays.microbatches, np.int64),
        np.empty(size, np.int64),
        np.empty(3),
        np.empty(size, np.int64),
    )
    if prefix is not None:
        arrays = _priced(arrays, best_cuts, prefix, overhead)
    return Orders(
        arrays=arrays, word=best, first=orders.first, cuts=best_cuts, step=float(result[0]), span=float(result[1])
    )


def _priced(arrays: Arrays, cuts: np.ndarray, prefix: np.ndarray, overhead: float) -> Arrays:
    """The same with the times and the memory of the stages that `cuts` make."""
    edges = np.concatenate([[0], cuts, [prefix.shape[1] - 1]])
    parts = prefix[:, edges[1:]] - prefix[:, edges[:-1]]
    forward, inputs, weights, held = parts
    return Arrays(
        place=arrays.place,
        duration=np.concatenate([forward, inputs, weights, inputs + weights]) + overhead,
        memory=np.concatenate([held, -held / 2, -held / 2, -held]),
        lag_forward=arrays.lag_forward,
        lag_backward=arrays.lag_backward,
        limits=arrays.limits,
        finish=arrays.finish,
        microbatches=arrays.microbatches,
    )

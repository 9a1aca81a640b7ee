"""One schedule that is changed step by step: after a move only what was evaluated after it is evaluated again."""

from __future__ import annotations

import numpy as np

from ...plans import RequestError, Schedule
from .arrays import Arrays, orders_of, schedule_of
from .costs import StageCosts
from .kernel import Scratch, evaluate, shift, weights_follow

__all__ = ["Incremental"]


class Incremental:
    """The makespan of a schedule of fixed stages under moves within a rank's order. Micro-batches are alike."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        costs = costs.complete()
        if costs.microbatch_scale or costs.blocking or not costs.overlap:
            raise RequestError(
                "'costs' must have equal micro-batches and overlapping transfers here, got others; simulate them"
            )
        schedule.check()
        self._arrays = Arrays.of(costs, schedule.placement, schedule.ranks, schedule.microbatches, None)
        self._word, self._first = orders_of(schedule)
        self._start = np.zeros(len(self._word))
        self._sequence = np.zeros(len(self._word), np.int64)
        self._scratch = Scratch.of(schedule.ranks, schedule.stages, schedule.microbatches)
        self._evaluate(0)

    @property
    def makespan(self) -> float:
        """End of the last action, in the unit of the costs."""
        return float(self._scratch.free.max())

    @property
    def schedule(self) -> Schedule:
        """The schedule as it is now."""
        arrays = self._arrays
        return schedule_of(self._word, self._first, arrays.place.tolist(), arrays.microbatches)

    def move(self, rank: int, source: int, target: int) -> bool:
        """Put a rank's action number `source` at place `target`, the ones between moving up or down by one.

        False, and nothing changes, if the data would not allow that order. Two actions of one kind and stage stay in
        order: the micro-batches are numbered as they come.
        """
        low = int(self._first[rank])
        source, target = low + source, low + target
        begin, end = min(source, target), max(source, target)
        if not low <= begin <= end < self._first[rank + 1]:
            raise RequestError(
                f"'move' must stay within the order of rank {rank}, got {source - low} to {target - low}"
            )
        keep = int(self._sequence[begin])
        shift(self._word, source, target)
        stages = self._arrays.stages
        high, stage = int(self._first[rank + 1]), int(self._word[target]) % stages
        follows = weights_follow(self._word, low, high, stages, stage)
        if follows and self._evaluate(keep):
            return True
        shift(self._word, target, source)
        if follows:
            self._evaluate(0)
        return False

    def _evaluate(self, keep: int) -> bool:
        arrays = self._arrays
        return bool(
            evaluate(
                self._word,
                self._first,
                arrays.place,
                arrays.duration,
                arrays.lag_forward,
                arrays.lag_backward,
                arrays.microbatches,
                self._start,
                self._sequence,
                keep,
                *self._scratch.parts(),
            )
        )

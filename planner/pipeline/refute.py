"""Show that no schedule of fixed stages ends by a given time: what raises a bound, and proves a schedule to be best.

Under a deadline every action has a window. Of two actions of a rank that fit its windows in one order only, that order
is fixed (immediate selection, Carlier and Pinson, 1989); each order fixed raises heads and tails, which fix more. If an
action no longer fits its window, there is no such schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...cost_models.pipeline import StageCosts
from .bounds import Heads

__all__ = ["raised_bound", "refuted"]

_F, _I, _W = 0, 1, 2
_ROUNDS = 60


def raised_bound(
    costs: StageCosts,
    placement: Sequence[int],
    microbatches: int,
    limits: Sequence[float] | None,
    bound: float,
    reached: float,
    step: float,
    tests: int = 8,
) -> float:
    """The largest bound between `bound` and `reached` that a few deadlines prove; times are multiples of `step`.

    Without a step (0) a deadline that is refuted is the bound itself.
    """
    low, high = bound, reached
    for test in range(tests):
        if high - low <= max(step, 1e-9 * reached) * 0.5:
            break
        # First whether what is reached is best, then in halves.
        deadline = high - (step or 1e-6 * reached) if test == 0 else (low + high - step) / 2
        deadline = math.floor(deadline / step + 1e-9) * step if step else deadline
        if deadline < low:
            break
        if refuted(costs, placement, microbatches, limits, deadline):
            low = max(low, deadline + step)
        else:
            high = deadline
    return low


def refuted(
    costs: StageCosts,
    placement: Sequence[int],
    microbatches: int,
    limits: Sequence[float] | None,
    deadline: float,
) -> bool:
    """Whether no schedule ends by `deadline`. False says nothing."""
    return _Windows(costs, placement, microbatches, limits, deadline * (1 + 1e-12)).refuted()


class _Windows:
    """Heads, tails and fixed orders of all actions: arrays kinds x stages x micro-batches, a square matrix per rank."""

    def __init__(
        self,
        costs: StageCosts,
        placement: Sequence[int],
        microbatches: int,
        limits: Sequence[float] | None,
        deadline: float,
    ) -> None:
        self.count, self.stages, self.deadline = microbatches, costs.stages, deadline
        per_stage = np.array([[costs.duration(kind, stage) for stage in range(costs.stages)] for kind in "FIW"])
        self.time = np.repeat(per_stage[:, :, None], microbatches, axis=2)
        self.lag = [costs.transfer(s) if placement[s] != placement[s + 1] else 0.0 for s in range(costs.stages - 1)]
        forth = Heads(costs, placement, microbatches, limits, backwards=False)
        back = Heads(costs, placement, microbatches, limits, backwards=True)
        self.head = np.array(forth.head)
        self.tail = np.array(back.head)[::-1, :, ::-1].copy()
        self.halves = forth.window
        self.ranks = [[s for s, rank in enumerate(placement) if rank == place] for place in sorted(set(placement))]
        self.before = [self._orders(stages) for stages in self.ranks]

    def _orders(self, stages: list[int]) -> np.ndarray:
        """before[a, b]: data or the order of micro-batches put action a of a rank before b."""
        size = len(stages)
        before = np.zeros((3, size, self.count, 3, size, self.count), bool)
        not_later = np.triu(np.ones((self.count, self.count), bool))
        earlier = np.triu(not_later, 1)
        for a in range(size):
            for kind in range(3):
                before[kind, a, :, kind, a] = earlier
            before[_I, a, :, _W, a] = not_later
            for b in range(size):
                before[_F, a, :, _I, b] = not_later
                before[_F, a, :, _W, b] = not_later
                if a < b:
                    before[_F, a, :, _F, b] = not_later
                    before[_I, b, :, _I, a] = not_later
                    before[_I, b, :, _W, a] = not_later
        actions = 3 * size * self.count
        return before.reshape(actions, actions)

    def _for_memory(self, number: int) -> bool:
        """Fix what must give memory back before each forward; False if that is more than can come before it.

        Of the I and W that may come before a forward at all, as many must as its memory takes, the first ones first.
        """
        halves = self.halves[self.ranks[number][0]]
        if halves is None:
            return True
        before = self.before[number].reshape(3, self.count, 3, self.count)
        for index in range(self.count):
            freed = 2 * (index + 1) - halves
            if freed <= 0:
                continue
            inputs, weights = (self.count - int(before[_F, index, kind].sum()) for kind in (_I, _W))
            if inputs + min(weights, inputs) < freed:
                return False
            before[_I, : max((freed + 1) // 2, freed - weights), _F, index] = True
            before[_W, : max(0, freed - inputs), _F, index] = True
        return True

    def refuted(self) -> bool:
        for _ in range(_ROUNDS):
            old = self.head.sum() + self.tail.sum()
            fixed = sum(int(before.sum()) for before in self.before)
            self._along_data()
            for number in range(len(self.ranks)):
                if not (self._for_memory(number) and self._along_rank(number)):
                    return True
            if (self.head + self.time + self.tail > self.deadline).any():
                return True
            same = fixed == sum(int(before.sum()) for before in self.before)
            if same and self.head.sum() + self.tail.sum() <= old + 1e-9:
                return False
        return False

    def _along_data(self) -> None:
        head, tail, time = self.head, self.tail, self.time
        for stage in range(1, self.stages):
            ready = head[_F, stage - 1] + time[_F, stage - 1] + self.lag[stage - 1]
            head[_F, stage] = np.maximum(head[_F, stage], ready)
        last = self.stages - 1
        head[_I, last] = np.maximum(head[_I, last], head[_F, last] + time[_F, last])
        for stage in range(last - 1, -1, -1):
            ready = head[_I, stage + 1] + time[_I, stage + 1] + self.lag[stage]
            head[_I, stage] = np.maximum(head[_I, stage], ready)
        for stage in range(1, self.stages):
            left = tail[_I, stage - 1] + time[_I, stage - 1] + self.lag[stage - 1]
            tail[_I, stage] = np.maximum(tail[_I, stage], left)
        tail[_F, last] = np.maximum(tail[_F, last], tail[_I, last] + time[_I, last])
        for stage in range(last - 1, -1, -1):
            left = tail[_F, stage + 1] + time[_F, stage + 1] + self.lag[stage]
            tail[_F, stage] = np.maximum(tail[_F, stage], left)

    def _along_rank(self, number: int) -> bool:
        """Raise heads and tails of a rank and fix orders; False if two actions fit in no order."""
        stages, before = self.ranks[number], self.before[number]
        time = self.time[:, stages].ravel()
        head = np.maximum(self.head[:, stages].ravel(), _completion(self.head[:, stages].ravel(), time, before))
        tail = np.maximum(self.tail[:, stages].ravel(), _completion(self.tail[:, stages].ravel(), time, before.T))
        first = head[:, None] + time[:, None] + time[None, :] + tail[None, :] > self.deadline
        np.fill_diagonal(first, False)
        # first[a, b]: a cannot come before b.
        before |= first.T
        before |= (before.astype(np.float32) @ before.astype(np.float32)) > 0
        if (before & before.T).any():
            return False
        self.head[:, stages] = head.reshape(3, len(stages), self.count)
        self.tail[:, stages] = tail.reshape(3, len(stages), self.count)
        return True


def _completion(head: np.ndarray, time: np.ndarray, before: np.ndarray) -> np.ndarray:
    """For each action the least time by which all that comes before it can be done, one after the other."""
    order = np.argsort(head, kind="stable")
    masked = np.where(before[order], time[order, None], 0.0)
    rest = np.cumsum(masked[::-1], axis=0)[::-1]
    return np.where(before[order], head[order, None] + rest, 0.0).max(axis=0)

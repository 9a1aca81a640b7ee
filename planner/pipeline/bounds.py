"""Lower bounds on the time of any schedule of fixed stages on fixed ranks: proved, whatever the search finds.

Micro-batches are alike, so in some best schedule every stage does them in order. Each action then has a head, the least
time before its start, and a tail, the least time after its end, from what must precede and follow it: along the
data, on its own rank, and, since a forward needs memory that only a backward gives back, between them. Each rank
alone, its actions interruptible, takes at least what Jackson's rule gives (Carlier, 1982); the largest of these is
the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from ...cost_models.pipeline import StageCosts

__all__ = ["Heads", "fixed_stages_bound", "whole_numbers"]

_F, _I, _W = 0, 1, 2
_ROUNDS = 6


def fixed_stages_bound(
    costs: StageCosts, placement: Sequence[int], microbatches: int, limits: Sequence[float] | None = None
) -> float:
    """A time that no schedule of these stages undercuts, in the unit of the costs; `limits`: memory per rank."""
    if costs.microbatch_scale:
        return _load_bound(costs, placement, microbatches)
    forth = Heads(costs, placement, microbatches, limits, backwards=False)
    back = Heads(costs, placement, microbatches, limits, backwards=True)
    bound = 0.0
    for rank in set(placement):
        jobs = []
        for stage in (stage for stage, place in enumerate(placement) if place == rank):
            for kind in (_F, _I, _W):
                for index in range(microbatches):
                    head = forth.head[kind][stage][index]
                    tail = back.head[_W - kind][stage][microbatches - 1 - index]
                    jobs.append((head, forth.time[kind][stage], tail))
        finish = math.fsum(costs.finish[stage] for stage, place in enumerate(placement) if place == rank)
        bound = max(bound, _one_rank(jobs), _one_rank([(h, t, 0.0) for h, t, _ in jobs]) + finish)
    return _settled(bound, costs)


def whole_numbers(costs: StageCosts) -> bool:
    """Whether all times are whole numbers, so that every makespan is one."""
    parts = (costs.forward, costs.input_gradient, costs.weight_gradient, costs.finish)
    numbers = [*(value for part in parts for value in part), costs.overhead]
    numbers += [costs.transfer(stage) for stage in range(costs.stages - 1)]
    return all(value == int(value) for value in numbers)


def _settled(bound: float, costs: StageCosts) -> float:
    """A bound freed of rounding: of whole numbers the next whole one, else a little less."""
    return float(math.ceil(bound - 1e-6)) if whole_numbers(costs) else bound * (1 - 1e-12)


def _load_bound(costs: StageCosts, placement: Sequence[int], microbatches: int) -> float:
    total = [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        total[rank] += math.fsum(costs.duration(kind, stage, index) for kind in "FIW" for index in range(microbatches))
    return max(total) * (1 - 1e-12)


def _one_rank(jobs: list[tuple[float, float, float]]) -> float:
    """Jackson's preemptive rule: of the jobs (head, time, tail) that have come, the one with the longest tail runs."""
    jobs = sorted(jobs)
    waiting: list[list[float]] = []
    now, at, bound = 0.0, 0, 0.0
    while at < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= now:
            heapq.heappush(waiting, [-jobs[at][2], jobs[at][1]])
            at += 1
        until = jobs[at][0] if at < len(jobs) else math.inf
        job = waiting[0]
        if now + job[1] <= until:
            now += job[1]
            bound = max(bound, now - job[0])
            heapq.heappop(waiting)
        else:
            job[1] -= until - now
            now = until
    return bound


class Heads:
    """Earliest starts. Read backwards, the same problem has W first and F last, and its heads are the tails of
    this one.
    """

    def __init__(
        self,
        costs: StageCosts,
        placement: Sequence[int],
        microbatches: int,
        limits: Sequence[float] | None,
        *,
        backwards: bool,
    ) -> None:
        self.count, self.stages, self.placement = microbatches, costs.stages, placement
        durations = [[costs.duration(kind, stage) for stage in range(self.stages)] for kind in "FIW"]
        self.time = durations[::-1] if backwards else durations
        self.backwards = backwards
        self.lag = [
            costs.transfer(stage) if placement[stage] != placement[stage + 1] else 0.0
            for stage in range(self.stages - 1)
        ]
        self.window = _windows(costs, placement, microbatches, limits)
        self.head = [[[0.0] * microbatches for _ in range(self.stages)] for _ in range(3)]
        self.mates = [
            [s for s, place in enumerate(placement) if place == placement[stage]] for stage in range(self.stages)
        ]
        for _ in range(_ROUNDS):
            before = [[list(row) for row in rows] for rows in self.head]
            self._along_data()
            self._along_ranks()
            if self.head == before:
                break

    def _raise(self, kind: int, stage: int, index: int, value: float) -> None:
        if value > self.head[kind][stage][index]:
            self.head[kind][stage][index] = value

    def _end(self, kind: int, stage: int, index: int) -> float:
        return self.head[kind][stage][index] + self.time[kind][stage]

    def _along_data(self) -> None:
        for index in range(self.count):
            for kind in range(3):
                upwards = self.backwards == (kind == _I)
                order = range(self.stages) if upwards else range(self.stages - 1, -1, -1)
                for stage in order:
                    self._one(kind, stage, index, stage - 1 if upwards else stage + 1)

    def _one(self, kind: int, stage: int, index: int, source: int) -> None:
        """Raise one head by its own stage's earlier actions and by its neighbour's.

        Forwards: F after F of the stage before; I after I of the stage behind; W after I. Backwards: kind 0 is W, 2
        is F.
        """
        if index:
            self._raise(kind, stage, index, self._end(kind, stage, index - 1))
        if kind:
            self._raise(kind, stage, index, self._end(kind - 1, stage, index))
        passes = kind == _I or kind == (_W if self.backwards else _F)
        if passes and 0 <= source < self.stages:
            self._raise(kind, stage, index, self._end(kind, source, index) + self.lag[min(stage, source)])

    def _along_ranks(self) -> None:
        """Raise heads by all that a rank must have done before: it does one thing at a time."""
        for stage in range(self.stages):
            for index in range(self.count):
                for kind in range(3):
                    self._raise(kind, stage, index, self._completion(self._before(kind, stage, index)))

    def _completion(self, jobs: Iterable[tuple[float, float]]) -> float:
        end = 0.0
        for head, time in sorted(jobs):
            end = max(end, head) + time
        return end

    def _before(self, kind: int, stage: int, index: int) -> list[tuple[float, float]]:
        """(head, time) of actions that a rank must do before this one."""
        if self.backwards:
            return self._before_backwards(kind, stage, index)
        jobs = self._some(kind, stage, index)
        if kind == _F:
            for mate in self.mates[stage]:
                if mate < stage:
                    jobs += self._some(_F, mate, index + 1)
            jobs += self._freed(stage, index)
        elif kind == _I:
            for mate in self.mates[stage]:
                jobs += self._some(_F, mate, index + 1)
                if mate > stage:
                    jobs += self._some(_I, mate, index + 1)
        else:
            jobs += self._some(_I, stage, index + 1) + self._some(_F, stage, index + 1)
        return jobs

    def _before_backwards(self, kind: int, stage: int, index: int) -> list[tuple[float, float]]:
        jobs = self._some(kind, stage, index)
        if kind == _I:
            jobs += self._some(0, stage, index + 1)
            for mate in self.mates[stage]:
                if mate < stage:
                    jobs += self._some(_I, mate, index + 1) + self._some(0, mate, index + 1)
        elif kind == 2:
            jobs += self._some(_I, stage, index + 1) + self._some(0, stage, index + 1)
            for mate in self.mates[stage]:
                jobs += self._some(_I, mate, index + 1) if mate != stage else []
                jobs += self._some(0, mate, index + 1) if mate != stage else []
                jobs += self._some(2, mate, index + 1) if mate > stage else []
        halves = self.window[stage]
        if kind == _I and halves is not None:
            # Read backwards: the forwards that could not run before this gave memory back.
            jobs += self._some(2, stage, index + 1 - halves // 2)
        return jobs

    def _some(self, kind: int, stage: int, count: int) -> list[tuple[float, float]]:
        return [(head, self.time[kind][stage]) for head in self.head[kind][stage][: max(0, count)]]

    def _freed(self, stage: int, index: int) -> list[tuple[float, float]]:
        """What must have given memory back before this forward, where the stage is alone on its rank."""
        halves = self.window[stage]
        if halves is None or 2 * (index + 1) <= halves:
            return []
        freed = 2 * (index + 1) - halves
        inputs = (freed + 1) // 2
        # No more W than I have run; more I may stand in the place of a W.
        extra = (self._end(_I, stage, 0), min(self.time[_I][stage], self.time[_W][stage]))
        return self._some(_I, stage, inputs) + [extra] * (freed - inputs)


def _windows(
    costs: StageCosts, placement: Sequence[int], microbatches: int, limits: Sequence[float] | None
) -> list[int | None]:
    """How many halves of a micro-batch a stage can hold, where it is alone on its rank and I and W give back half
    each.
    """
    windows: list[int | None] = []
    for stage, rank in enumerate(placement):
        held = costs.memory_forward[stage]
        halves = costs.memory_input_gradient[stage] == costs.memory_weight_gradient[stage] == -held / 2
        if limits is None or placement.count(rank) > 1 or not halves or held <= 0:
            windows.append(None)
        else:
            windows.append(max(2, int(2 * limits[rank] / held + 1e-9)))
    return windows

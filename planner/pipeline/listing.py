"""Build the orders of given stages on given ranks by list scheduling: whenever a rank is free, its most urgent ready
action.

A forward starts only if its memory fits and the oldest micro-batch on its way forth can still get through: on every
rank that holds a part of later micro-batches still on their way forth, room for one whole micro-batch is kept beside
them. Micro-batches all the way forth can always go back and free what they hold, so the ranks never stand still.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...cost_models.pipeline.arrays import Arrays
from ...cost_models.pipeline.kernel import compiled
from .orders import Orders

__all__ = ["ListScratch", "Listed", "list_orders", "list_schedules"]


class Listed(NamedTuple):
    """What `list_orders` is given: times and memory by code, transfers by stage, limits and last work by rank."""

    place: np.ndarray
    duration: np.ndarray
    memory: np.ndarray
    lag_forward: np.ndarray
    lag_backward: np.ndarray
    limits: np.ndarray
    finish: np.ndarray

    @classmethod
    def of(cls, arrays: Arrays) -> Listed:
        """The problem of these stages."""
        return cls(
            arrays.place,
            arrays.duration,
            arrays.memory,
            arrays.lag_forward,
            arrays.lag_backward,
            arrays.limits,
            arrays.finish,
        )


class ListScratch(NamedTuple):
    """Working space and results of `list_orders`: the codes of each rank and how many, the end of each rank in
    `by_rank[3]`, and the ends of F and I by code and micro-batch.
    """

    rows: np.ndarray
    lengths: np.ndarray
    by_rank: np.ndarray
    on_rank: np.ndarray
    done: np.ndarray
    ends: np.ndarray

    @classmethod
    def make(cls, ranks: int, stages: int, microbatches: int) -> ListScratch:
        """Space for a problem of this size."""
        return cls(
            np.zeros((ranks, 3 * stages * microbatches), np.int64),
            np.zeros(ranks, np.int64),
            np.zeros((5, ranks)),
            np.zeros((ranks, stages + 1), np.int64),
            np.zeros(3 * stages, np.int64),
            np.zeros((2 * stages, microbatches)),
        )

    def orders(self, arrays: Arrays, cuts: np.ndarray) -> Orders | None:
        """What the last run wrote, as a solution."""
        word = np.concatenate([row[:length] for row, length in zip(self.rows, self.lengths, strict=True)])
        return Orders.of(arrays, word, np.concatenate([[0], np.cumsum(self.lengths)]), cuts.tolist())


@compiled
def list_orders(
    problem: Listed,
    key: np.ndarray,
    most: np.ndarray,
    patience: float,
    turns: float,
    press: float,
    give_up: float,
    scratch: ListScratch,
) -> float:
    """Write each rank's codes into `scratch`; the step time, or infinity past `give_up`.

    key: by code of F and I and micro-batch, less is sooner. most: how many micro-batches a stage holds between F and I,
    the oldest on its way forth aside. turns: added to a forward right after one, press: added to
    it as memory fills. patience: which share of its own time a W keeps off rather than let work wait that is ready
    before its end. Infinity, too, if a rank cannot hold one micro-batch.
    """
    place, duration, memory = problem.place, problem.duration, problem.memory
    rows, lengths, on_rank, done, ends = scratch.rows, scratch.lengths, scratch.on_rank, scratch.done, scratch.ends
    limits = problem.limits
    stages = place.shape[0]
    ranks = limits.shape[0]
    microbatches = key.shape[1]
    by_rank = scratch.by_rank
    held, whole, partial, free, wake = by_rank[0], by_rank[1], by_rank[2], by_rank[3], by_rank[4]
    for rank in range(ranks):
        lengths[rank] = 0
        on_rank[rank, stages] = 0
        for part in range(5):
            by_rank[part, rank] = 0.0
    for code in range(3 * stages):
        done[code] = 0
    for stage in range(stages):
        rank = place[stage]
        on_rank[rank, on_rank[rank, stages]] = stage
        on_rank[rank, stages] += 1
        whole[rank] += memory[stage]
    for rank in range(ranks):
        if whole[rank] > limits[rank]:
            return math.inf
    left = 3 * stages * microbatches
    while left:
        rank = 0
        for other in range(1, ranks):
            if wake[other] < wake[rank]:
                rank = other
        now = wake[rank]
        if now > give_up:
            return math.inf
        best = -1
        best_key = math.inf
        due = -1
        due_index = microbatches
        soon = math.inf
        blocked = False
        oldest = done[stages - 1]
        room = limits[rank] - held[rank]
        beside = limits[rank] - partial[rank] - whole[rank]
        later = press * held[rank] / limits[rank]
        if lengths[rank] > 0 and rows[rank, lengths[rank] - 1] < stages:
            later += turns
        for slot in range(on_rank[rank, stages]):
            stage = on_rank[rank, slot]
            index = done[stage]
            if index < microbatches and (stage == 0 or done[stage - 1] > index):
                ready = 0.0 if stage == 0 else ends[stage - 1, index] + problem.lag_forward[stage]
                fits = memory[stage] <= room
                if index != oldest:
                    fits = fits and (memory[stage] <= beside or stage == stages - 1)
                    fits = fits and index - done[stages + stage] < most[stage]
                if not fits:
                    blocked = blocked or ready <= now
                elif ready > now:
                    soon = min(soon, ready)
                elif key[stage, index] + later < best_key:
                    best = stage
                    best_key = key[stage, index] + later
            index = done[stages + stage]
            if index < done[stage] and (stage == stages - 1 or done[stages + stage + 1] > index):
                ready = 0.0 if stage == stages - 1 else ends[stages + stage + 1, index] + problem.lag_backward[stage]
                if ready > now:
                    soon = min(soon, ready)
                elif key[stages + stage, index] < best_key:
                    best = stages + stage
                    best_key = key[stages + stage, index]
            index = done[2 * stages + stage]
            if index < done[stages + stage] and index < due_index:
                due = 2 * stages + stage
                due_index = index
        if best < 0 and due >= 0 and (blocked or now + patience * duration[due] <= soon):
            best = due
        if best < 0:
            wake[rank] = soon
            continue
        kind = best // stages
        stage = best - kind * stages
        index = done[best]
        done[best] += 1
        left -= 1
        end = now + duration[best]
        rows[rank, lengths[rank]] = best
        lengths[rank] += 1
        held[rank] += memory[best]
        free[rank] = end
        wake[rank] = end
        if kind == 2:
            continue
        ends[best, index] = end
        if kind == 0 and stage == stages - 1:
            # The next micro-batch is the oldest now: what it holds is no longer beside the oldest.
            for mine in range(stages):
                if done[mine] > index + 1:
                    partial[place[mine]] -= memory[mine]
            for other in range(ranks):
                wake[other] = min(wake[other], max(free[other], now))
        elif kind == 0:
            if index != oldest:
                partial[rank] += memory[stage]
            other = place[stage + 1]
            wake[other] = min(wake[other], max(free[other], end + problem.lag_forward[stage + 1]))
        elif stage > 0:
            other = place[stage - 1]
            wake[other] = min(wake[other], max(free[other], end + problem.lag_backward[stage - 1]))
    step = 0.0
    for rank in range(ranks):
        step = max(step, free[rank] + problem.finish[rank])
    return step


def list_schedules(arrays: Arrays, ranks: int, cuts: np.ndarray) -> Iterator[Orders]:
    """A few list schedules of these stages, from backward first to forward first."""
    stages, microbatches = arrays.stages, arrays.microbatches
    scratch = ListScratch.make(ranks, stages, microbatches)
    number = np.arange(microbatches, dtype=np.float64)
    most = np.full(stages, microbatches)
    for bias in (-1e6, -2.0, 1.0):
        key = np.concatenate([np.tile(number, (stages, 1)), np.tile(number + bias, (stages, 1))])
        step = list_orders(Listed.of(arrays), key, most, 0.5, 0.0, 0.0, math.inf, scratch)
        found = scratch.orders(arrays, cuts) if step < math.inf else None
        if found is not None:
            yield found

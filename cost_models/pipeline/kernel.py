"""The compiled inner loop of the simulator: the orders of all ranks as one array of codes, evaluated as soon as
possible.

A code is kind * stages + stage with the kinds below; micro-batches are not written, since each stage does each kind in
order. `first[rank]` to `first[rank + 1]` are the codes of a rank. Scratch is handed in: to allocate it inside would
cost more compile time than all the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

__all__ = ["CODE_KINDS", "Scratch", "compiled", "evaluate", "shift", "weights_follow"]

CODE_KINDS = ("F", "I", "W", "B")


def compiled(function: Any) -> Any:
    """`function`, compiled at its first call; kept beside its file where that can be written to."""
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:
        # Nowhere to keep it (a read-only or packed installation): it is compiled in each process.
        return numba.njit(error_model="numpy")(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Working space of `evaluate`: by rank, by stage, and by stage and micro-batch."""

    at: np.ndarray
    queue: np.ndarray
    queued: np.ndarray
    free: np.ndarray
    counts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, ranks: int, stages: int, microbatches: int) -> Scratch:
        """Working space for a problem of this size."""
        return cls(
            at=np.zeros(ranks, np.int64),
            queue=np.zeros(ranks, np.int64),
            queued=np.zeros(ranks, np.int64),
            free=np.zeros(ranks),
            counts=np.zeros(2 * stages, np.int64),
            ends=np.zeros(2 * stages * microbatches),
        )

    def parts(self) -> tuple[np.ndarray, ...]:
        """The arrays in the order in which `evaluate` takes them."""
        return self.at, self.queue, self.queued, self.free, self.counts, self.ends


@compiled
def evaluate(
    word: np.ndarray,
    first: np.ndarray,
    place: np.ndarray,
    duration: np.ndarray,
    lag_forward: np.ndarray,
    lag_backward: np.ndarray,
    microbatches: int,
    start: np.ndarray,
    sequence: np.ndarray,
    keep: int,
    at: np.ndarray,
    queue: np.ndarray,
    queued: np.ndarray,
    free: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
) -> bool:
    """Write the start of every code into `start`; False if the ranks stand still.

    duration: by code. lag_forward[s], lag_backward[s]: from the end of the neighbour's action to stage s. The rest is
    `Scratch`; afterwards `free` holds the end of each rank. sequence: in which turn each position was evaluated; the
    first `keep` turns of an earlier call with this scratch stand, if only codes of later turns changed places since.
    """
    stages = place.shape[0]
    ranks = first.shape[0] - 1
    if keep == 0:
        for stage in range(2 * stages):
            counts[stage] = 0
    left = 0
    for rank in range(ranks):
        queue[rank] = ranks - 1 - rank
        queued[rank] = 1
        position = first[rank]
        free[rank] = 0.0
        if keep > 0:
            position = first[rank + 1]
            while position > first[rank] and sequence[position - 1] >= keep:
                position -= 1
                code = word[position]
                if code < 2 * stages:
                    counts[code] -= 1
                elif code >= 3 * stages:
                    counts[code - 2 * stages] -= 1
            if position > first[rank]:
                free[rank] = start[position - 1] + duration[word[position - 1]]
        at[rank] = position
        left += first[rank + 1] - position
    turn = keep
    waiting = ranks
    while waiting:
        waiting -= 1
        rank = queue[waiting]
        queued[rank] = 0
        position = at[rank]
        now = free[rank]
        while position < first[rank + 1]:
            code = word[position]
            kind = code // stages
            stage = code - kind * stages
            if kind == 2:
                start[position] = now
                sequence[position] = turn
                turn += 1
                now += duration[code]
                position += 1
                continue
            # Stages go up for F; backwards actions are counted behind them and go down.
            base = 0 if kind == 0 else stages
            lane = base + stage
            index = counts[lane]
            source = lane - 1 if kind == 0 else lane + 1
            target = lane + 1 if kind == 0 else lane - 1
            if (kind == 0 and stage > 0) or (kind != 0 and stage + 1 < stages):
                if counts[source] <= index:
                    break
                lag = lag_forward[stage] if kind == 0 else lag_backward[stage]
                ready = ends[source * microbatches + index] + lag
                if ready > now:
                    now = ready
            elif kind != 0 and counts[stage] <= index:
                break
            start[position] = now
            sequence[position] = turn
            turn += 1
            now += duration[code]
            ends[lane * microbatches + index] = now
            counts[lane] = index + 1
            if base <= target < base + stages:
                other = place[target - base]
                if other != rank and queued[other] == 0:
                    queued[other] = 1
                    queue[waiting] = other
                    waiting += 1
            position += 1
        left -= position - at[rank]
        at[rank] = position
        free[rank] = now
    return left == 0


@compiled
def shift(word: np.ndarray, source: int, target: int) -> None:
    """Take the code at `source` out and put it at `target`, the codes between moving by one."""
    code = word[source]
    step = 1 if target > source else -1
    position = source
    while position != target:
        word[position] = word[position + step]
        position += step
    word[target] = code


@compiled
def weights_follow(word: np.ndarray, low: int, high: int, stages: int, stage: int) -> bool:
    """Whether every W of a stage comes after its I: it has no other data to wait for."""
    due = 0
    for position in range(low, high):
        if word[position] == stages + stage:
            due += 1
        elif word[position] == 2 * stages + stage:
            due -= 1
            if due < 0:
                return False
    return True

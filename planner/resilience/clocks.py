"""The time of pipelines of unlike stages: one replica under 1F1B, compiled, and replicas that share micro-batches.

1F1B with windows: a stage does as many forwards as its window before its first backward, then one of each in turn. The
usual window of stage s of S is S - s; where memory allows more, wider ones give unlike stages room.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ...cost_models.pipeline.kernel import compiled

__all__ = ["best_windows", "even_layers", "refine", "shared_s"]


@compiled
def _one_f_one_b(
    forward: np.ndarray,
    backward: np.ndarray,
    windows: np.ndarray,
    stages: int,
    delay: float,
    microbatches: int,
    ends: np.ndarray,
    free: np.ndarray,
) -> float:
    """The makespan. windows never grow from one stage to the next. ends: (2, stages, micro-batches), scratch."""
    for stage in range(stages):
        free[stage] = 0.0
    for round_ in range(microbatches + windows[0]):
        for stage in range(stages - 1, -1, -1):
            index = round_ - windows[stage]
            if index < 0 or index >= microbatches:
                continue
            start = free[stage]
            if stage < stages - 1 and ends[1, stage + 1, index] + delay > start:
                start = ends[1, stage + 1, index] + delay
            free[stage] = start + backward[stage]
            ends[1, stage, index] = free[stage]
        if round_ < microbatches:
            for stage in range(stages):
                start = free[stage]
                if stage > 0 and ends[0, stage - 1, round_] + delay > start:
                    start = ends[0, stage - 1, round_] + delay
                free[stage] = start + forward[stage]
                ends[0, stage, round_] = free[stage]
    last = 0.0
    for stage in range(stages):
        if free[stage] > last:
            last = free[stage]
    return last


@compiled
def _time(
    cuts: np.ndarray,
    sums: np.ndarray,
    rate: np.ndarray,
    degree: np.ndarray,
    share: np.ndarray,
    numbers: np.ndarray,
    microbatches: int,
    forward: np.ndarray,
    backward: np.ndarray,
    room: np.ndarray,
    windows: np.ndarray,
    ends: np.ndarray,
    free: np.ndarray,
    wide: int,
) -> float:
    """Pipeline and gradient reduction of one replica; inf where memory is too small.

    numbers: delay, memory, seconds per gradient byte. `wide`: a window is that many times the usual one, 0 for as wide
    as memory allows."""
    stages = cuts.shape[0] - 1
    delay = numbers[0]
    finish = 0.0
    for stage in range(stages):
        low = cuts[stage]
        high = cuts[stage + 1]
        moved = (sums[5, high] - sums[5, low]) * share[stage]
        forward[stage] = (sums[0, high] - sums[0, low]) / rate[stage] + moved
        backward[stage] = (sums[1, high] - sums[1, low]) / rate[stage] + moved
        held = (sums[4, high] - sums[4, low]) / degree[stage]
        left = numbers[1] - (sums[2, high] - sums[2, low]) / degree[stage]
        fits = microbatches
        if left < 0.0 or held > left:
            return np.inf
        if held > 0.0 and left / held < microbatches:
            fits = int(left / held)
        room[stage] = fits
        reduced = (sums[3, high] - sums[3, low]) / degree[stage] * numbers[2]
        if reduced > finish:
            finish = reduced
    for stage in range(stages):
        window = room[stage]
        if wide > 0 and wide * (stages - stage) < window:
            window = wide * (stages - stage)
        if stage > 0 and windows[stage - 1] < window:
            window = windows[stage - 1]
        windows[stage] = window
    return _one_f_one_b(forward, backward, windows, stages, delay, microbatches, ends, free) + finish


@compiled
def best_windows(
    cuts: np.ndarray,
    sums: np.ndarray,
    rate: np.ndarray,
    degree: np.ndarray,
    share: np.ndarray,
    numbers: np.ndarray,
    microbatches: int,
    usual: bool,
    parts: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
) -> float:
    """The best time over windows of 1, 2 and as many as fit times the usual; of the usual alone where `usual`."""
    best = np.inf
    for wide in (1, 2, 0):
        if wide != 1 and usual:
            break
        found = _time(
            cuts, sums, rate, degree, share, numbers, microbatches,
            parts[0], parts[1], counts[0], counts[1], ends, parts[2], wide,
        )  # fmt: skip
        if found < best:
            best = found
            counts[2, 0] = wide
    return best


@compiled
def refine(
    cuts: np.ndarray,
    sums: np.ndarray,
    rate: np.ndarray,
    degree: np.ndarray,
    share: np.ndarray,
    numbers: np.ndarray,
    microbatches: int,
    parts: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
) -> float:
    """Move layers from a longest stage to another, one at a time, while the time gets less; cuts change in place."""
    stages = cuts.shape[0] - 1
    best = best_windows(cuts, sums, rate, degree, share, numbers, microbatches, False, parts, counts, ends)
    # The windows that are best at the start are kept to.
    wide = counts[2, 0]
    improved = True
    tried = 0
    while improved:
        improved = False
        for giver in range(stages):
            load = 0.0
            for stage in range(stages):
                held = sums[:2, cuts[stage + 1]].sum() - sums[:2, cuts[stage]].sum()
                load = max(load, held / rate[stage])
            held = sums[:2, cuts[giver + 1]].sum() - sums[:2, cuts[giver]].sum()
            if np.isfinite(best) and held / rate[giver] < 0.999 * load:
                continue
            for taker in range(stages):
                if giver == taker or cuts[giver + 1] - cuts[giver] <= 1:
                    continue
                tried += 1
                if tried > 160:
                    return best
                # All cuts between the two move by one layer.
                step = -1 if giver < taker else 1
                low = min(giver, taker) + 1
                high = max(giver, taker)
                for cut in range(low, high + 1):
                    cuts[cut] += step
                found = _time(
                    cuts, sums, rate, degree, share, numbers, microbatches,
                    parts[0], parts[1], counts[0], counts[1], ends, parts[2], wide,
                )  # fmt: skip
                if found < best * (1.0 - 1e-12):
                    best = found
                    improved = True
                else:
                    for cut in range(low, high + 1):
                        cuts[cut] -= step
    return best


@compiled
def even_layers(sums: np.ndarray, rates: np.ndarray, counts: np.ndarray) -> None:
    """Write layers per stage, in order, for which the longest stage is shortest; sums: seconds before each layer."""
    stages = rates.shape[0]
    layers = sums.shape[0] - 1
    low = sums[layers] / rates.sum()
    # Whatever the counts, no stage takes longer than all layers on the slowest group.
    high = sums[layers] / rates.min()
    for turn in range(48):
        limit = high if turn == 47 else (low + high) / 2.0
        at = 0
        for stage in range(stages):
            end = at + 1
            last = layers - (stages - stage - 1)
            while end < last and sums[end + 1] - sums[at] <= limit * rates[stage] * (1.0 + 1e-12):
                end += 1
            if sums[end] - sums[at] > limit * rates[stage] * (1.0 + 1e-12):
                at = -1
                break
            counts[stage] = end - at
            at = end
        if at == layers:
            high = limit
        else:
            low = limit


def shared_s(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    begins: Sequence[int],
    loads: Sequence[Sequence[int]],
    delay: float,
    room: Sequence[Sequence[int]],
) -> float:
    """The makespan where micro-batches pass between replicas: each group does a backward if it can, else a forward.

    forward, backward: seconds by replica and stage. begins: micro-batches by replica. loads: by stage and replica.
    room: how many micro-batches a group may hold at once.
    """
    routes = _routes(begins, loads)
    stages, replicas = len(loads), len(begins)
    inflight = [[0] * stages for _ in range(replicas)]
    busy = [[False] * stages for _ in range(replicas)]
    ready: list[list[tuple[list[int], list[int]]]] = [[([], []) for _ in range(stages)] for _ in range(replicas)]
    events: list[tuple[float, int, int, int, int, int]] = []
    for index, route in enumerate(routes):
        heapq.heappush(ready[route[0]][0][0], index)
    last = 0.0

    def begin(now: float, replica: int, stage: int) -> None:
        forwards, backwards = ready[replica][stage]
        if busy[replica][stage] or not (backwards or (forwards and inflight[replica][stage] < room[replica][stage])):
            return
        kind = 1 if backwards else 0
        index = heapq.heappop(backwards if kind else forwards)
        busy[replica][stage] = True
        inflight[replica][stage] += 0 if kind else 1
        seconds = (backward if kind else forward)[replica][stage]
        heapq.heappush(events, (now + seconds, 0, replica, stage, kind, index))

    for replica in range(replicas):
        begin(0.0, replica, 0)
    while events:
        now, arrives, replica, stage, kind, index = heapq.heappop(events)
        if arrives:
            heapq.heappush(ready[replica][stage][kind], index)
            begin(now, replica, stage)
            continue
        last = now
        busy[replica][stage] = False
        inflight[replica][stage] -= kind
        onward = stage + 1 if kind == 0 else stage - 1
        if kind == 0 and onward == stages:
            heapq.heappush(ready[replica][stage][1], index)
        elif 0 <= onward < stages:
            heapq.heappush(events, (now + delay, 1, routes[index][onward], onward, kind, index))
        begin(now, replica, stage)
    return last


def _routes(begins: Sequence[int], loads: Sequence[Sequence[int]]) -> list[list[int]]:
    """Which replica does each micro-batch at each stage: its own as far as that has room, the surplus spread evenly."""
    homes: list[int] = []
    left = list(begins)
    while any(left):
        # Replicas take turns, so that a micro-batch's number says about when it runs.
        for replica, count in enumerate(left):
            if count:
                homes.append(replica)
                left[replica] -= 1
    routes: list[list[int]] = [[] for _ in homes]
    for row in loads:
        spare = [max(0, load - begin) for load, begin in zip(row, begins, strict=True)]
        over = [max(0, begin - load) for load, begin in zip(row, begins, strict=True)]
        takers = _spread(spare)
        seen = [0] * len(begins)
        for route, home in zip(routes, homes, strict=True):
            seen[home] += 1
            # Of a replica that gives away k of n, every n/k-th goes.
            gives = seen[home] * over[home] // begins[home] > (seen[home] - 1) * over[home] // begins[home]
            route.append(takers.pop() if gives else home)
    return routes


def _spread(counts: Sequence[int]) -> list[int]:
    """Each replica as often as its count, mixed evenly; the last is taken first."""
    order = [((turn + 0.5) / count, replica) for replica, count in enumerate(counts) for turn in range(count)]
    return [replica for _, replica in sorted(order, reverse=True)]

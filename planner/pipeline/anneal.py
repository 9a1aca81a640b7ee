"""Improve orders and cuts of stages on fixed ranks: simulated annealing on moves along the critical path."""

from __future__ import annotations

import math

import numpy as np

from ...cost_models.pipeline.kernel import compiled, evaluate, shift

__all__ = ["anneal_orders", "draw", "price"]


@compiled
def draw(state: np.ndarray, below: int) -> int:
    """A random whole number from 0 up to `below` (xorshift, Marsaglia 2003)."""
    x = state[0]
    x ^= (x << 13) & 0x7FFFFFFFFFFFFFFF
    x ^= x >> 7
    x ^= (x << 17) & 0x7FFFFFFFFFFFFFFF
    state[0] = x
    return (x >> 11) % below


@compiled
def _allowed(
    word: np.ndarray, low: int, high: int, stages: int, memory: np.ndarray, limit: float, done: np.ndarray
) -> bool:
    """Whether a rank's order keeps F before I before W in every stage and its memory within the limit."""
    for position in range(low, high):
        done[word[position]] = 0
        done[word[position] % stages] = 0
    held = 0.0
    for position in range(low, high):
        code = word[position]
        kind = code // stages
        done[code] += 1
        if kind == 3:
            if done[code] > done[code - 3 * stages]:
                return False
        elif kind != 0 and done[code] > done[code - stages]:
            return False
        held += memory[code]
        if held > limit:
            return False
    return True


@compiled
def _repair(
    word: np.ndarray, low: int, high: int, stages: int, memory: np.ndarray, limit: float, done: np.ndarray
) -> bool:
    """Bring what gives memory back before forwards that would not fit; whether the order is then allowed."""
    for position in range(low, high):
        done[word[position]] = 0
        done[word[position] % stages] = 0
        done[stages + word[position] % stages] = 0
    held = 0.0
    position = low
    while position < high:
        code = word[position]
        kind = code // stages
        if kind == 0 and held + memory[code] > limit:
            source = position + 1
            while source < high:
                other = word[source]
                before = 0 if other < stages else other - (3 if other >= 3 * stages else 1) * stages
                if other >= stages and done[other] < done[before]:
                    break
                source += 1
            if source == high:
                return False
            shift(word, source, position)
            continue
        done[code] += 1
        if kind == 3:
            if done[code] > done[code - 3 * stages]:
                return False
        elif kind != 0 and done[code] > done[code - stages]:
            return False
        held += memory[code]
        if held > limit:
            return False
        position += 1
    return True


@compiled
def _reprice(
    low: int,
    high: int,
    cuts: np.ndarray,
    prefix: np.ndarray,
    overhead: float,
    duration: np.ndarray,
    memory: np.ndarray,
    stages: int,
) -> None:
    """Times and memory of the stages from `low` to `high`, both counted in."""
    for stage in range(low, high + 1):
        begin = 0 if stage == 0 else cuts[stage - 1]
        end = prefix.shape[1] - 1 if stage == stages - 1 else cuts[stage]
        price(stage, begin, end, prefix, overhead, duration, memory, stages)


@compiled
def _score(first: np.ndarray, start: np.ndarray, free: np.ndarray, finish: np.ndarray, result: np.ndarray) -> int:
    """Step time, longest span and mean end of a rank into `result`; the position that ends last."""
    result[0], result[1], result[2] = 0.0, 0.0, 0.0
    latest = 0
    for rank in range(first.shape[0] - 1):
        if first[rank] == first[rank + 1]:
            continue
        if free[rank] + finish[rank] > result[0]:
            result[0] = free[rank] + finish[rank]
            latest = first[rank + 1] - 1
        result[1] = max(result[1], free[rank] - start[first[rank]])
        result[2] += (free[rank] + finish[rank]) / (first.shape[0] - 1)
    return latest


@compiled
def _number(
    word: np.ndarray, stages: int, microbatches: int, done: np.ndarray, index_of: np.ndarray, position_of: np.ndarray
) -> None:
    """The micro-batch of each position, and the positions of F and of I or B by stage and micro-batch."""
    for code in range(4 * stages):
        done[code] = 0
    for position in range(word.shape[0]):
        code = word[position]
        index = done[code]
        done[code] += 1
        index_of[position] = index
        if code < 2 * stages:
            position_of[code * microbatches + index] = position
        elif code >= 3 * stages:
            position_of[(code - 2 * stages) * microbatches + index] = position


@compiled
def _critical(
    word: np.ndarray,
    first: np.ndarray,
    place: np.ndarray,
    duration: np.ndarray,
    start: np.ndarray,
    index_of: np.ndarray,
    position_of: np.ndarray,
    microbatches: int,
    latest: int,
    path: np.ndarray,
) -> int:
    """Positions on the critical path that wait for the action before them on their rank; how many."""
    stages = place.shape[0]
    count = 0
    position = latest
    while True:
        code = word[position]
        kind = code // stages
        stage = code - kind * stages
        if position > first[place[stage]] and start[position - 1] + duration[word[position - 1]] >= start[position]:
            path[count] = position
            count += 1
            position -= 1
        elif kind == 0 and stage > 0:
            position = position_of[(stage - 1) * microbatches + index_of[position]]
        elif kind % 2 == 1 and stage + 1 < stages:
            position = position_of[(stages + stage + 1) * microbatches + index_of[position]]
        else:
            return count


@compiled
def price(
    stage: int,
    low: int,
    high: int,
    prefix: np.ndarray,
    overhead: float,
    duration: np.ndarray,
    memory: np.ndarray,
    stages: int,
) -> None:
    """Times and memory of a stage that holds the units from `low` to `high`."""
    for kind in range(3):
        duration[kind * stages + stage] = prefix[kind, high] - prefix[kind, low] + overhead
    duration[3 * stages + stage] = duration[stages + stage] + duration[2 * stages + stage] - overhead
    held = prefix[3, high] - prefix[3, low]
    memory[stage] = held
    memory[stages + stage] = -0.5 * held
    memory[2 * stages + stage] = -0.5 * held
    memory[3 * stages + stage] = -held


@compiled
def anneal_orders(
    word: np.ndarray,
    first: np.ndarray,
    place: np.ndarray,
    duration: np.ndarray,
    memory: np.ndarray,
    lag_forward: np.ndarray,
    lag_backward: np.ndarray,
    limits: np.ndarray,
    finish: np.ndarray,
    microbatches: int,
    cuts: np.ndarray,
    prefix: np.ndarray,
    overhead: float,
    cut_share: float,
    iterations: int,
    hot: float,
    cold: float,
    span_weight: float,
    mean_weight: float,
    target: float,
    state: np.ndarray,
    best: np.ndarray,
    best_cuts: np.ndarray,
    result: np.ndarray,
    start: np.ndarray,
    sequence: np.ndarray,
    at: np.ndarray,
    queue: np.ndarray,
    queued: np.ndarray,
    free: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
    done: np.ndarray,
    index_of: np.ndarray,
    position_of: np.ndarray,
    path: np.ndarray,
    pair: np.ndarray,
    saved: np.ndarray,
) -> int:
    """Anneal `word` and `cuts` in place for `iterations` moves from temperature `hot` to `cold`; how many were made.

    cut_share: share of moves that shift a cut, or a row of them, by a unit, with `prefix` the sums of F, I, W and
    memory before each unit. mean_weight: how much the mean end of the ranks counts beside the last one, so that idle
    time off the critical path is worth removing. result: step time and span of `best`, then of `word`. Stops once the
    step time is at most `target`. The arrays from
    `start` on are scratch.
    """
    stages = place.shape[0]
    size = word.shape[0]
    units = prefix.shape[1] - 1
    one = 1 << 40
    evaluate(
        word,
        first,
        place,
        duration,
        lag_forward,
        lag_backward,
        microbatches,
        start,
        sequence,
        0,
        at,
        queue,
        queued,
        free,
        counts,
        ends,
    )
    latest = _score(first, start, free, finish, pair)
    current = pair[0] + span_weight * pair[1] + mean_weight * pair[2]
    result[2] = pair[0]
    result[3] = pair[1]
    _number(word, stages, microbatches, done, index_of, position_of)
    count = _critical(word, first, place, duration, start, index_of, position_of, microbatches, latest, path)
    cooling = math.log(cold / hot)
    temperature = hot
    for step in range(iterations + 1):
        if step % 64 == 0:
            temperature = hot * math.exp(cooling * step / iterations)
        source, goal, cut, last_cut, way = -1, -1, -1, -1, 0
        kept_low, kept_high = 0, 0
        if step == iterations:
            break
        if step > 0 and draw(state, one) < cut_share * one:
            cut = draw(state, stages - 1)
            last_cut = cut if draw(state, 2) == 0 else min(stages - 2, cut + draw(state, stages))
            way = 2 * draw(state, 2) - 1
            low = 0 if cut == 0 else cuts[cut - 1]
            high = units if last_cut == stages - 2 else cuts[last_cut + 1]
            if not (low < cuts[cut] + way and cuts[last_cut] + way < high):
                continue
            for moved in range(cut, last_cut + 1):
                cuts[moved] += way
            _reprice(cut, last_cut + 1, cuts, prefix, overhead, duration, memory, stages)
            kept_high = size
            for position in range(size):
                saved[position] = word[position]
            good = True
            for rank in range(first.shape[0] - 1):
                good = good and _repair(word, first[rank], first[rank + 1], stages, memory, limits[rank], done)
        else:
            reach = 1 + draw(state, 1 + draw(state, 12))
            if count > 0 and draw(state, 100) < 85:
                position = path[draw(state, count)]
                rank = place[word[position] % stages]
                if draw(state, 2) == 0:
                    source, goal = position, max(first[rank], position - reach)
                else:
                    source, goal = position - 1, min(first[rank + 1] - 1, position - 1 + reach)
            else:
                source = draw(state, size)
                rank = place[word[source] % stages]
                if draw(state, 2) == 0:
                    reach = -reach
                goal = min(max(source + reach, first[rank]), first[rank + 1] - 1)
            if word[goal] == word[source]:
                continue
            if draw(state, 3) == 0:
                kept_low, kept_high = first[rank], first[rank + 1]
                for position in range(kept_low, kept_high):
                    saved[position] = word[position]
                shift(word, source, goal)
                good = _repair(word, kept_low, kept_high, stages, memory, limits[rank], done)
            else:
                shift(word, source, goal)
                good = _allowed(word, first[rank], first[rank + 1], stages, memory, limits[rank], done)
        if good and evaluate(
            word,
            first,
            place,
            duration,
            lag_forward,
            lag_backward,
            microbatches,
            start,
            sequence,
            0,
            at,
            queue,
            queued,
            free,
            counts,
            ends,
        ):
            latest = _score(first, start, free, finish, pair)
            value = pair[0] + span_weight * pair[1] + mean_weight * pair[2]
            if value <= current or draw(state, one) < one * math.exp((current - value) / temperature):
                current = value
                result[2] = pair[0]
                result[3] = pair[1]
                if pair[0] + span_weight * pair[1] < result[0] + span_weight * result[1] - 1e-9:
                    result[0] = pair[0]
                    result[1] = pair[1]
                    for position in range(size):
                        best[position] = word[position]
                    for stage in range(cuts.shape[0]):
                        best_cuts[stage] = cuts[stage]
                    if pair[0] <= target:
                        return step
                _number(word, stages, microbatches, done, index_of, position_of)
                count = _critical(
                    word, first, place, duration, start, index_of, position_of, microbatches, latest, path
                )
                continue
        if cut >= 0:
            for moved in range(cut, last_cut + 1):
                cuts[moved] -= way
            _reprice(cut, last_cut + 1, cuts, prefix, overhead, duration, memory, stages)
        if kept_high > kept_low:
            for position in range(kept_low, kept_high):
                word[position] = saved[position]
        else:
            shift(word, goal, source)
    return iterations

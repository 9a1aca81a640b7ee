"""Search over cuts, placement and the rule of a list schedule together: simulated annealing, one schedule per move."""

from __future__ import annotations

import math

import numpy as np

from ...cost_models.pipeline.kernel import compiled
from .anneal import draw, price
from .listing import list_orders

__all__ = ["anneal_plans"]


@compiled
def _refresh(
    cuts: np.ndarray,
    place: np.ndarray,
    prefix: np.ndarray,
    overhead: float,
    delays: np.ndarray,
    duration: np.ndarray,
    memory: np.ndarray,
    lag_forward: np.ndarray,
    lag_backward: np.ndarray,
    loads: np.ndarray,
) -> float:
    """Costs of the stages that `cuts` and `place` make; the largest time per micro-batch of a rank."""
    stages = place.shape[0]
    units = prefix.shape[1] - 1
    for rank in range(loads.shape[0]):
        loads[rank] = 0.0
    low = 0
    for stage in range(stages):
        high = units if stage == stages - 1 else cuts[stage]
        price(stage, low, high, prefix, overhead, duration, memory, stages)
        loads[place[stage]] += duration[stage] + duration[stages + stage] + duration[2 * stages + stage]
        if stage > 0:
            lag = delays[low] if place[stage] != place[stage - 1] else 0.0
            lag_forward[stage] = lag
            lag_backward[stage - 1] = lag
        low = high
    most = 0.0
    for rank in range(loads.shape[0]):
        if loads[rank] == 0.0:
            return math.inf
        most = max(most, loads[rank])
    return most


@compiled
def _change(
    cuts: np.ndarray,
    place: np.ndarray,
    urgency: np.ndarray,
    window: np.ndarray,
    knobs: np.ndarray,
    units: int,
    ranks: int,
    microbatches: int,
    state: np.ndarray,
) -> None:
    """One small change of a plan: a cut or a row of cuts by a unit, a stage's rank, two stages' ranks, or the rule."""
    stages = place.shape[0]
    move = draw(state, 100)
    if move < 55 and stages > 1:
        from_cut = draw(state, stages - 1)
        to_cut = from_cut
        if move >= 40:
            to_cut = min(stages - 2, from_cut + draw(state, stages))
        way = 2 * draw(state, 2) - 1
        low = 0 if from_cut == 0 else cuts[from_cut - 1]
        high = units if to_cut == stages - 2 else cuts[to_cut + 1]
        if low < cuts[from_cut] + way and cuts[to_cut] + way < high:
            for cut in range(from_cut, to_cut + 1):
                cuts[cut] += way
    elif move < 62:
        place[draw(state, stages)] = draw(state, ranks)
    elif move < 70:
        stage = draw(state, stages)
        other = draw(state, stages) if move < 66 else min(stages - 1, stage + 1)
        rank = place[stage]
        place[stage] = place[other]
        place[other] = rank
    elif move < 90:
        change = draw(state, 4001) / 1000.0 - 2.0
        if move < 73:
            # All stages of a rank, or all of a kind, at once.
            rank = draw(state, ranks + 2)
            for code in range(2 * stages):
                if place[code % stages] == rank or code // stages == rank - ranks:
                    urgency[code] += change
        else:
            urgency[draw(state, 2 * stages)] += change
    elif move < 98:
        stage = draw(state, stages)
        if draw(state, 4) == 0:
            window[stage] = 1 + draw(state, microbatches)
        else:
            window[stage] = max(1, min(microbatches, window[stage] + 2 * draw(state, 2) - 1))
    else:
        knobs[0] = draw(state, 1251) / 1000.0


@compiled
def anneal_plans(
    cuts: np.ndarray,
    place: np.ndarray,
    urgency: np.ndarray,
    window: np.ndarray,
    knobs: np.ndarray,
    prefix: np.ndarray,
    overhead: float,
    delays: np.ndarray,
    limits: np.ndarray,
    finish: np.ndarray,
    microbatches: int,
    iterations: int,
    hot: float,
    cold: float,
    state: np.ndarray,
    best_cuts: np.ndarray,
    best_place: np.ndarray,
    best_urgency: np.ndarray,
    best_window: np.ndarray,
    best_knobs: np.ndarray,
    old_cuts: np.ndarray,
    old_place: np.ndarray,
    old_urgency: np.ndarray,
    old_window: np.ndarray,
    duration: np.ndarray,
    memory: np.ndarray,
    lag_forward: np.ndarray,
    lag_backward: np.ndarray,
    loads: np.ndarray,
    rows: np.ndarray,
    lengths: np.ndarray,
    by_rank: np.ndarray,
    on_rank: np.ndarray,
    done: np.ndarray,
    ends: np.ndarray,
) -> float:
    """Anneal a plan in place for `iterations` moves from temperature `hot` to `cold`; the step time of the best.

    cuts, place, urgency, window and knobs[0] (patience) are the plan; delays[u] is the transfer in front of unit u.
    The best goes to the arrays best_*; the rest is scratch, and duration to lag_backward hold the costs of the last
    plan tried.
    """
    stages = place.shape[0]
    ranks = limits.shape[0]
    units = prefix.shape[1] - 1
    one = 1 << 40
    current = math.inf
    best = math.inf
    cooling = math.log(cold / hot)
    # The mean end of the ranks counts a little, so that idle time off the critical rank is worth removing; it is at
    # least:
    share = knobs[1]
    even = share * (prefix[0, units] + prefix[1, units] + prefix[2, units]) * microbatches / ranks
    for step in range(iterations):
        temperature = hot * math.exp(cooling * step / iterations)
        for stage in range(stages):
            old_place[stage] = place[stage]
            old_window[stage] = window[stage]
            old_urgency[stage] = urgency[stage]
            old_urgency[stages + stage] = urgency[stages + stage]
            if stage < stages - 1:
                old_cuts[stage] = cuts[stage]
        old_patience = knobs[0]
        changes = 0
        while step > 0 and (changes == 0 or (changes < 4 and draw(state, 2) == 0)):
            _change(cuts, place, urgency, window, knobs, units, ranks, microbatches, state)
            changes += 1
        load = _refresh(cuts, place, prefix, overhead, delays, duration, memory, lag_forward, lag_backward, loads)
        # What a plan may cost to be taken is drawn first, so that hopeless ones are given up early.
        most = current - temperature * math.log((1 + draw(state, one)) / one)
        value = math.inf
        if load * microbatches + even <= most:
            value = list_orders(
                place,
                duration,
                memory,
                lag_forward,
                lag_backward,
                limits,
                finish,
                microbatches,
                urgency,
                window,
                knobs[0],
                most - even,
                rows,
                lengths,
                by_rank,
                on_rank,
                done,
                ends,
            )
        reached = value
        if value < math.inf:
            for rank in range(ranks):
                value += share * by_rank[3, rank] / ranks
        if value <= most and value < math.inf:
            current = value
            if reached < best:
                best = reached
                for stage in range(stages):
                    best_place[stage] = place[stage]
                    best_window[stage] = window[stage]
                    best_urgency[stage] = urgency[stage]
                    best_urgency[stages + stage] = urgency[stages + stage]
                    if stage < stages - 1:
                        best_cuts[stage] = cuts[stage]
                best_knobs[0] = knobs[0]
            continue
        for stage in range(stages):
            place[stage] = old_place[stage]
            window[stage] = old_window[stage]
            urgency[stage] = old_urgency[stage]
            urgency[stages + stage] = old_urgency[stages + stage]
            if stage < stages - 1:
                cuts[stage] = old_cuts[stage]
        knobs[0] = old_patience
    return best

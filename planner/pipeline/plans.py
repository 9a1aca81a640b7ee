"""Search over cuts, placement and orders together: simulated annealing whose every step lists the actions forth, back
from the end and forth again.

A list schedule packs its beginning well and leaves its end loose. Listed again in reversed time, by when each action
ended, its end is packed too; listed forth once more by when each then starts, what is left is close to both
(justification, Li and Willis, 1992). Reversed, a W, or a share of it, and the I before it count as one action that
takes memory, and F gives it back. Forth again the W fill what is idle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ...cost_models.pipeline.kernel import compiled
from .anneal import draw, price
from .listing import Listed, ListScratch, list_orders

__all__ = ["Plan", "Search", "anneal_plans", "refresh", "settle"]


class Plan(NamedTuple):
    """Cuts, rank of each stage, the key of each F and I by micro-batch, and how many micro-batches each stage holds at
    most between F and I, all changed in place.
    """

    cuts: np.ndarray
    place: np.ndarray
    key: np.ndarray
    most: np.ndarray

    def copy(self) -> Plan:
        """The same in arrays of its own."""
        return Plan(self.cuts.copy(), self.place.copy(), self.key.copy(), self.most.copy())


class Search(NamedTuple):
    """What does not change while plans are searched, and the space to work in.

    prefix: sums of F, I, W and memory before each unit. delays: the transfer in front of each unit. forth, back: the
    problem and the same in reversed time, priced anew for each plan.
    """

    prefix: np.ndarray
    overhead: float
    delays: np.ndarray
    forth: Listed
    back: Listed
    scratch: ListScratch
    loads: np.ndarray
    key: np.ndarray
    state: np.ndarray


@compiled
def refresh(plan: Plan, search: Search, fused: float) -> float:
    """Price the stages of the plan, forth and back; the largest time per micro-batch of a rank.

    fused: which share of W the reversed problem keeps room for with its I.
    """
    forth, back, loads, delays = search.forth, search.back, search.loads, search.delays
    stages = plan.place.shape[0]
    units = search.prefix.shape[1] - 1
    for rank in range(loads.shape[0]):
        loads[rank] = 0.0
    low = 0
    for stage in range(stages):
        high = units if stage == stages - 1 else plan.cuts[stage]
        rank = plan.place[stage]
        price(stage, low, high, search.prefix, search.overhead, forth.duration, forth.memory, stages)
        forward = forth.duration[stage]
        inputs, weights = forth.duration[stages + stage], forth.duration[2 * stages + stage]
        forth.place[stage] = rank
        back.place[stage] = rank
        back.duration[stage] = inputs + fused * weights
        back.duration[stages + stage] = forward
        back.duration[2 * stages + stage] = 0.0
        back.memory[stage] = forth.memory[stage]
        back.memory[stages + stage] = -forth.memory[stage]
        back.memory[2 * stages + stage] = 0.0
        loads[rank] += forward + inputs + weights
        if stage > 0:
            lag = delays[low] if rank != plan.place[stage - 1] else 0.0
            forth.lag_forward[stage] = lag
            forth.lag_backward[stage - 1] = lag
            back.lag_forward[stage] = lag
            back.lag_backward[stage - 1] = lag
        low = high
    most = 0.0
    for rank in range(loads.shape[0]):
        if loads[rank] == 0.0:
            return math.inf
        most = max(most, loads[rank])
    return most


@compiled
def _from_the_end(ends: np.ndarray, key: np.ndarray, end: float) -> None:
    """Keys for the reversed problem: how long before `end` each action ended."""
    stages, microbatches = ends.shape[0] // 2, ends.shape[1]
    for stage in range(stages):
        for index in range(microbatches):
            key[stage, microbatches - 1 - index] = end - ends[stages + stage, index]
            key[stages + stage, microbatches - 1 - index] = end - ends[stage, index]


@compiled
def settle(search: Search, key: np.ndarray, most: np.ndarray, rule: np.ndarray, passes: int, give_up: float) -> float:
    """List the plan of `search` by `key`, then so often back and forth; the last step time, its schedule in the
    scratch.

    rule: patience, turns and press of the first list (see `list_orders`); the others go by their keys alone.
    """
    step = list_orders(search.forth, key, most, rule[0], rule[1], rule[2], give_up, search.scratch)
    for _ in range(passes):
        if step == math.inf:
            break
        _from_the_end(search.scratch.ends, search.key, step)
        step = list_orders(search.back, search.key, most, 0.0, 0.0, 0.0, give_up, search.scratch)
        if step == math.inf:
            break
        _from_the_end(search.scratch.ends, search.key, step)
        step = list_orders(search.forth, search.key, most, rule[0], 0.0, 0.0, give_up, search.scratch)
    return step


@compiled
def _change_stages(plan: Plan, units: int, ranks: int, state: np.ndarray) -> None:
    """One small change: a cut or a row of cuts by a unit, a stage's rank, two stages' ranks, two ranks' names."""
    cuts, place = plan.cuts, plan.place
    stages = place.shape[0]
    move = draw(state, 100)
    if move < 50 and stages > 1 and stages < units:
        from_cut = draw(state, stages - 1)
        to_cut = from_cut
        if move >= 35:
            to_cut = min(stages - 2, from_cut + draw(state, stages))
        way = 2 * draw(state, 2) - 1
        low = 0 if from_cut == 0 else cuts[from_cut - 1]
        high = units if to_cut == stages - 2 else cuts[to_cut + 1]
        if low < cuts[from_cut] + way and cuts[to_cut] + way < high:
            for cut in range(from_cut, to_cut + 1):
                cuts[cut] += way
    elif move < 65:
        place[draw(state, stages)] = draw(state, ranks)
    else:
        stage = draw(state, stages)
        other = draw(state, stages) if move < 80 else min(stages - 1, stage + 1)
        rank = place[stage]
        place[stage] = place[other]
        place[other] = rank


@compiled
def _change_keys(key: np.ndarray, span: float, state: np.ndarray) -> None:
    """Bring a stage's actions of a kind, a micro-batch's, one action or all on one way sooner or later, by up to
    `span`.
    """
    codes, microbatches = key.shape
    change = span * (draw(state, 2001) / 1000.0 - 1.0)
    move = draw(state, 100)
    if move < 40:
        code = draw(state, codes)
        low = draw(state, microbatches)
        for index in range(low, microbatches):
            key[code, index] += change
    elif move < 70:
        index = draw(state, microbatches)
        low = draw(state, codes)
        high = min(codes, low + 1 + draw(state, codes))
        for code in range(low, high):
            key[code, index] += change
    elif move < 90:
        key[draw(state, codes), draw(state, microbatches)] += change
    else:
        for code in range(codes // 2):
            for index in range(microbatches):
                key[code, index] += change


@compiled
def _change_most(most: np.ndarray, microbatches: int, state: np.ndarray) -> None:
    """One more or less micro-batch held by a stage or a row of stages."""
    low = draw(state, most.shape[0])
    high = low if draw(state, 2) == 0 else min(most.shape[0] - 1, low + draw(state, most.shape[0]))
    change = 2 * draw(state, 2) - 1
    for stage in range(low, high + 1):
        most[stage] = min(microbatches, max(1, most[stage] + change))


@compiled
def anneal_plans(
    plan: Plan,
    search: Search,
    rule: np.ndarray,
    moves: int,
    hot: float,
    cold: float,
    mean_weight: float,
    stage_share: float,
    best: Plan,
    best_rows: np.ndarray,
    best_lengths: np.ndarray,
    old: Plan,
) -> float:
    """Anneal `plan` in place for `moves` from temperature `hot` to `cold`; the step time of the best.

    rule: of the first list (see `settle`), and fourth `fused` of half of the moves. mean_weight: how much the mean end
    of the ranks counts beside the last one, so that idle time off the critical rank is worth removing. stage_share: of
    the moves that change cuts and placement. The best plan goes to `best` and its codes to `best_rows` and
    `best_lengths`; `old` is scratch.
    """
    scratch, state = search.scratch, search.state
    stages = plan.place.shape[0]
    ranks = search.loads.shape[0]
    units = search.prefix.shape[1] - 1
    microbatches = plan.key.shape[1]
    one = 1 << 40
    current, least = math.inf, math.inf
    cooling = math.log(cold / hot)
    work = search.prefix[0, units] + search.prefix[1, units] + search.prefix[2, units]
    fair = work * microbatches / ranks
    even = mean_weight * fair
    first = rule.copy()
    for step in range(moves):
        temperature = hot * math.exp(cooling * step / moves)
        if step > 0:
            for stage in range(stages):
                old.place[stage] = plan.place[stage]
                old.most[stage] = plan.most[stage]
                if stage < stages - 1:
                    old.cuts[stage] = plan.cuts[stage]
            old.key[:] = plan.key
            changed = 0
            while changed == 0 or (changed < 4 and draw(state, 2) == 0):
                if draw(state, one) < stage_share * one:
                    _change_stages(plan, units, ranks, state)
                elif draw(state, 10) < 3:
                    _change_most(plan.most, microbatches, state)
                else:
                    span = fair * (0.1 if draw(state, 2) == 0 else 0.02)
                    _change_keys(plan.key, span, state)
                changed += 1
        fused = rule[3] if draw(state, 2) == 0 else 0.5 * draw(state, 3)
        load = refresh(plan, search, fused)
        # What a plan may cost to be taken is drawn first, so that hopeless ones are given up early.
        most = current - temperature * math.log((1 + draw(state, one)) / one)
        value = math.inf
        reached = math.inf
        if load * microbatches + even <= most:
            give_up = math.inf if step == 0 else 1.2 * most
            reached = settle(search, plan.key, plan.most, first, 1, give_up)
            value = reached
            for rank in range(ranks):
                value += mean_weight * scratch.by_rank[3, rank] / ranks
        first[1] = 0.0
        first[2] = 0.0
        if value <= most and value < math.inf:
            current = value
            for code in range(2 * stages):
                for index in range(microbatches):
                    plan.key[code, index] = scratch.ends[code, index] - search.forth.duration[code]
            if reached < least:
                least = reached
                for stage in range(stages):
                    best.place[stage] = plan.place[stage]
                    best.most[stage] = plan.most[stage]
                    if stage < stages - 1:
                        best.cuts[stage] = plan.cuts[stage]
                best.key[:] = plan.key
                best_lengths[:] = scratch.lengths
                best_rows[:] = scratch.rows
            continue
        if step > 0:
            for stage in range(stages):
                plan.place[stage] = old.place[stage]
                plan.most[stage] = old.most[stage]
                if stage < stages - 1:
                    plan.cuts[stage] = old.cuts[stage]
            plan.key[:] = old.key
    return least

"""Lower bounds on the step time of a layer profile under every partition, placement and schedule.

Number the ranks by their lowest unit. Rank k has at least k units and k transfers in front of it, so it starts no
sooner than these take forth and does its last input gradient no later than these need back from it. Before its first
input gradient it does forwards only, as many as its memory holds; after its last one weight gradients only,
likewise. All ranks together do at any time no more than all memory and the way back of each micro-batch allow. What is
left of a rank's time is its work, which an integer program shares out: whole units, memory for one micro-batch. Linear
programs over the time, in `flow_bound`, raise what that gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pulp

from ..solver.program import highs
from .flow_bound import flow_bound
from .profiles import LayerProfile
from .starts import Shares

__all__ = ["bound_and_shares", "profile_bound"]


def profile_bound(
    profile: LayerProfile,
    ranks: int,
    microbatches: int,
    *,
    limits: Sequence[float] | None = None,
    seconds: float = 1.0,
) -> float:
    """A time that no plan undercuts; the integer program and the linear ones (`flow_bound`) each get so many seconds
    and give what they have proved by then.

    Overheads are left out, which only lowers the bound. limits: memory per rank, all alike for the memory's part.
    """
    return bound_and_shares(profile, ranks, microbatches, limits=limits, seconds=seconds)[0]


def bound_and_shares(
    profile: LayerProfile,
    ranks: int,
    microbatches: int,
    *,
    limits: Sequence[float] | None = None,
    seconds: float = 1.0,
) -> tuple[float, Shares | None]:
    """`profile_bound`, and what the integer program gives each rank, if it found a solution."""
    starts = [_chain(profile, 0, rank) for rank in range(ranks)]
    ends = [_chain(profile, 1, rank) for rank in range(ranks)]
    limit = math.inf if limits is None else max(limits)
    start = max(
        math.fsum(starts),
        _memory_start(profile, ranks, microbatches, limit, starts),
        _chain_start(profile, ranks, microbatches, limit),
    )
    end = _memory_end(profile, microbatches, limit, ends)
    work = math.fsum(map(sum, profile.costs)) * microbatches
    bound = max((work + start + end) / ranks, _single_units(profile, microbatches))
    shared, shares = _shared_out(profile, microbatches, limit, starts, ends, start, end, seconds)
    bound = flow_bound(profile, ranks, microbatches, limit=limit, low=max(bound, shared), seconds=seconds)
    return bound * (1 - 1e-9), shares


def _chain(profile: LayerProfile, part: int, units: int) -> float:
    """Time through the first `units` units, each on another rank."""
    return math.fsum(cost[part] for cost in profile.costs[:units]) + units * profile.delay


def _rate(profile: LayerProfile, part: int) -> float:
    """The most time of F (0) or W (2) per memory that it holds, of units that hold any."""
    pairs = zip(profile.costs, profile.memory, strict=True)
    return max((cost[part] / held for cost, held in pairs if held > 0), default=0.0)


def _memory_start(profile: LayerProfile, ranks: int, microbatches: int, limit: float, starts: Sequence[float]) -> float:
    """The least sum over ranks of the idle time before their first input gradient."""
    if limit == math.inf:
        return 0.0
    forth = math.fsum(cost[0] for cost in profile.costs) + (ranks - 1) * profile.delay
    busy = _rate(profile, 0) * limit
    idle = 0.0
    for rank in range(ranks):
        # The ranks by their highest unit, from the end: as many units lie behind it.
        back = math.fsum(cost[1] for cost in profile.costs[profile.units - rank :]) + rank * profile.delay
        idle += max(starts[rank], forth + back - busy)
    # Forwards of units that hold nothing may come on top: of the last one for each micro-batch that is all the way
    # forth.
    held = math.fsum(profile.memory)
    through = min(microbatches, math.floor(ranks * limit / held + 1e-9)) if held > 0 else microbatches
    for unit, (cost, holds) in enumerate(zip(profile.costs, profile.memory, strict=True)):
        if holds <= 0:
            idle -= cost[0] * (through if unit == profile.units - 1 else microbatches)
    return idle


def _chain_start(profile: LayerProfile, ranks: int, microbatches: int, limit: float) -> float:
    """The least sum over ranks of the idle time up to the last input gradient of the last unit, which runs once for
    each micro-batch, on one rank.

    Micro-batches numbered by that: input gradients of each are a chain behind it. What gives memory back lets forwards
    follow.
    """
    parts = np.array([[*cost, held] for cost, held in zip(profile.costs, profile.memory, strict=True)]).T
    forth = float(parts[0].sum()) + (ranks - 1) * profile.delay
    last_forward, last_inputs = float(parts[0, -1]), float(parts[1, -1])
    number = np.arange(microbatches)
    back_from = forth + number * last_forward + (number + 1) * last_inputs
    times = np.linspace(forth, float(back_from[-1]), 300)
    chain = np.concatenate([[0.0], np.cumsum(parts[1, -2::-1])])
    cumulated = np.concatenate([parts[2:, -1:], parts[2:, -1:] + np.cumsum(parts[2:, -2::-1], axis=1)], axis=1)
    along = times[:, None] - back_from[None, :]
    begun = along >= 0
    passed = np.searchsorted(chain, np.maximum(along, 0.0) * (1 + 1e-12) + 1e-12, side="right") - 1
    inputs = np.clip(along, 0.0, chain[-1]) + begun * last_inputs
    # The last unit's own, of the first micro-batch not yet through.
    inputs = inputs.sum(axis=1) + last_inputs
    weights = (begun * cumulated[0][passed]).sum(axis=1)
    freed = (begun * cumulated[1][passed]).sum(axis=1)
    loose = parts[0, :-1][parts[3, :-1] <= 0].sum() * microbatches
    if profile.memory[-1] <= 0:
        loose += (
            np.minimum(microbatches, begun.sum(axis=1) + ranks * limit / max(parts[3].sum(), 1e-300)) * last_forward
        )
    rate = _rate(profile, 0)
    held = rate * (ranks * limit + freed) if rate > 0 else 0.0
    forwards = np.minimum(held + loose, microbatches * parts[0].sum())
    return max(0.0, float((ranks * times - forwards - inputs - weights).max()))


def _memory_end(profile: LayerProfile, microbatches: int, limit: float, ends: Sequence[float]) -> float:
    """The least sum over ranks of the idle time after their last input gradient."""
    every = math.fsum(cost[2] for cost in profile.costs) * microbatches
    idle = math.fsum(ends) - every
    if limit < math.inf:
        free = zip(profile.costs, profile.memory, strict=True)
        loose = math.fsum(cost[2] for cost, held in free if held <= 0) * microbatches
        # A weight gradient that waits holds half of what its forward took.
        busy = 2 * _rate(profile, 2) * limit
        idle = max(idle, math.fsum(max(0.0, end - busy) for end in ends) - loose)
    return max(0.0, idle)


def _single_units(profile: LayerProfile, microbatches: int) -> float:
    """The unit that is busiest with all before it once forth and once back."""
    bound = forth = back = 0.0
    for forward, inputs, weights in profile.costs:
        own = microbatches * (forward + inputs)
        bound = max(bound, forth + own + back, forth + own + microbatches * weights)
        forth += forward
        back += inputs
    return bound


def _shared_out(
    profile: LayerProfile,
    microbatches: int,
    limit: float,
    starts: Sequence[float],
    ends: Sequence[float],
    start: float,
    end: float,
    seconds: float,
) -> tuple[float, Shares | None]:
    """The bound of the integer program, how many units of each kind every rank has, and those numbers."""
    kinds = Counter(zip(profile.costs, profile.memory, strict=True))
    problem = pulp.LpProblem("shares", pulp.LpMinimize)
    time = problem.add_variable("time", lowBound=0)
    problem += time
    ranks = range(len(starts))
    begin = [problem.add_variable(f"begin{rank}", lowBound=starts[rank]) for rank in ranks]
    tail = [problem.add_variable(f"tail{rank}", lowBound=0) for rank in ranks]
    problem += pulp.lpSum(begin) >= start
    problem += pulp.lpSum(tail) >= end
    shares = {
        (kind, rank): problem.add_variable(f"share{index}_{rank}", lowBound=0, cat="Integer")
        for index, kind in enumerate(kinds)
        for rank in ranks
    }
    for kind, count in kinds.items():
        problem += pulp.lpSum(shares[kind, rank] for rank in ranks) == count
    last = (profile.costs[-1], profile.memory[-1])
    forth = math.fsum(cost[0] for cost in profile.costs) + (len(starts) - 1) * profile.delay
    for rank in ranks:
        own = [(kind, shares[kind, rank]) for kind in kinds]
        if limit < math.inf:
            # Forwards of units that hold nothing come on top of those that the memory holds.
            loose = microbatches * pulp.lpSum(k[0][0] * n for k, n in own if k[1] <= 0)
            behind = (last[0][1] + profile.delay) * (1 - shares[last, rank]) if kinds[last] == 1 else 0.0
            problem += begin[rank] >= forth + behind - _rate(profile, 0) * limit - loose
        problem += time >= begin[rank] + tail[rank] + microbatches * pulp.lpSum(sum(k[0]) * n for k, n in own)
        forth_and_back = microbatches * pulp.lpSum((k[0][0] + k[0][1]) * n for k, n in own)
        problem += time >= starts[rank] + ends[rank] + forth_and_back
        problem += pulp.lpSum(n for _, n in own) >= 1
        if limit < math.inf:
            problem += pulp.lpSum(k[1] * n for k, n in own) <= limit
    problem.solve(highs(max(0.2, seconds), 0.0))
    model = problem.solverModel
    found = model.getInfo().mip_dual_bound if model is not None else 0.0
    values = [[shares[kind, rank].value() for rank in ranks] for kind in kinds]
    if any(value is None for row in values for value in row):
        return (found if math.isfinite(found) else 0.0), None
    numbers = {kind: number for number, kind in enumerate(kinds)}
    of_units = [numbers[unit] for unit in zip(profile.costs, profile.memory, strict=True)]
    counts = np.rint(np.array(values, float)).astype(np.int64)
    whole = counts.sum(axis=1).tolist() == list(kinds.values())
    return (found if math.isfinite(found) else 0.0), Shares(counts, np.array(of_units)) if whole else None

"""Schedules of a replica's unlike stages: 1F1B with the windows that its price is for, or one searched by the tuner."""

from __future__ import annotations

import itertools

from ...cost_models.pipeline import StageCosts
from ...plans import Action, Health, Replica, Schedule
from ..pipeline import Clock, Tuned, tune_orders
from .workbench import Workbench, group_of

__all__ = ["schedule_of", "stage_costs", "tuned_schedule"]


def schedule_of(bench: Workbench, replica: Replica, health: Health) -> Schedule:
    """1F1B of a replica's unlike stages, with the windows that its price is for. Equal on all survivors."""
    speeds = bench.job.speeds(health)
    windows = bench.windows([group_of(g, speeds) for g in replica.groups], replica.layers, replica.microbatches)
    rows = []
    for stage, window in enumerate(windows):
        row = [Action(stage, "F", index) for index in range(window)]
        for index in range(replica.microbatches):
            row.append(Action(stage, "B", index))
            if index + window < replica.microbatches:
                row.append(Action(stage, "F", index + window))
        rows.append(tuple(row))
    return Schedule(microbatches=replica.microbatches, placement=tuple(range(len(windows))), actions=tuple(rows))


def stage_costs(bench: Workbench, replica: Replica, health: Health, *, split: bool = False) -> StageCosts:
    """What the stages of a replica take on their groups: seconds, and bytes that one micro-batch holds per device.

    split: half of the backward is the weights' gradient, which may be done later."""
    job, speeds = bench.job, bench.job.speeds(health)
    cuts = [0, *itertools.accumulate(replica.layers)]
    parts = []
    for group, (low, high) in zip(replica.groups, itertools.pairwise(cuts), strict=True):
        degree, speed = group_of(group, speeds)
        rate, sums = degree * speed / job.tensor, [row[high] - row[low] for row in job.sums]
        moved = sums[5] * 2 * (degree - 1) / degree / job.intra_bytes_per_s
        parts.append((sums[0] / rate + moved, sums[1] / rate + moved, sums[4] / degree))
    forward, backward, held = (tuple(column) for column in zip(*parts, strict=True))
    weight = tuple(seconds / 2 if split else 0.0 for seconds in backward)
    return StageCosts(
        forward=forward,
        input_gradient=tuple(a - b for a, b in zip(backward, weight, strict=True)),
        weight_gradient=weight,
        memory_forward=held,
        memory_input_gradient=tuple(-one / 2 for one in held),
        memory_weight_gradient=tuple(-one / 2 for one in held),
        delay=job.delay_s,
    ).complete()


def tuned_schedule(bench: Workbench, replica: Replica, health: Health, limit_s: float) -> Tuned:
    """The best order of F, I and W found in `limit_s` CPU seconds, within the memory that the replica's state leaves,
    with its proven bound. It depends on the time given: one survivor searches and tells the others."""
    job = bench.job
    cuts = [0, *itertools.accumulate(replica.layers)]
    state = job.sums[2]
    limits = [
        job.memory_bytes - (state[high] - state[low]) / len(group)
        for group, (low, high) in zip(replica.groups, itertools.pairwise(cuts), strict=True)
    ]
    stages = len(replica.groups)
    costs = stage_costs(bench, replica, health, split=True)
    clock = Clock(limit_s=limit_s)
    return tune_orders(costs, range(stages), stages, replica.microbatches, limits=limits, clock=clock)

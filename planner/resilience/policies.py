"""What other systems do about dead and slow devices, each by its published rule, as arrangements of the same job.

They are baselines, and starts of our own search: their arrangements are special cases of what it looks for. None means
that training stops until something is repaired. Rules as in the papers, or as readers report them where marked:

nothing     slow devices slow everything
drop        a replica with a dead device is left out, its micro-batches shared evenly
greyhound   Greyhound/FALCON (2410.12588): micro-batches per replica by the replicas' speeds; dead devices as in drop
recycle     ReCycle (2405.14009): a dead device takes its tensor group with it; the group's micro-batches go to its
            peers of the same stage. `recycle+` shares them by speed
oobleck     Oobleck (2309.08125): a dead device takes its node with it; pipelines of fewer nodes cover the rest.
            `oobleck+` shares micro-batches by speed and may leave slow nodes out
resihp      ResiHP (2605.06374, reported by readers): groups shrink to a power of two by k * min p, layers go by
            floor(L new/old) and then to the least (L + 1) / capacity, alike in all replicas; micro-batches go to peers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ...plans import Arrangement, Health
from .groups import best_group
from .job import Job, equal_layers
from .shares import earliest
from .workbench import Workbench, group_of, replica_of

__all__ = ["POLICIES", "healthy_arrangement", "repartitioned"]

Policy = Callable[[Workbench, Health], Arrangement | None]


def healthy_arrangement(job: Job) -> Arrangement:
    """The job as it begins: all groups whole, micro-batches shared evenly."""
    places = [[job.place(d, s) for s in range(job.stages)] for d in range(job.replicas)]
    return _even(job, [(row, job.layers_per_stage) for row in places])


def _even(job: Job, rows: Sequence[tuple[Sequence[tuple[int, ...]], tuple[int, ...]]]) -> Arrangement:
    counts = equal_layers(job.microbatches, len(rows))
    return Arrangement(
        replicas=tuple(replica_of(row, layers, m) for (row, layers), m in zip(rows, counts, strict=True) if m)
    )


def _by_speed(
    bench: Workbench, rows: Sequence[tuple[Sequence[tuple[int, ...]], tuple[int, ...]]], speeds: Sequence[float]
) -> Arrangement:
    """Micro-batches so that the replicas, layers as they are, end together as well as they can."""
    kinds = [(tuple(group_of(g, speeds) for g in row), layers) for row, layers in rows]
    job = bench.job
    lines: dict[tuple, tuple[float, float]] = {}
    mean = max(1, job.microbatches // len(rows))
    for groups, layers in kinds:
        first, second = (bench.replica_s(groups, layers, m, usual=True) for m in (mean, mean + 1))
        lines[groups, layers] = (first - mean * (second - first), second - first)
    counts = earliest(job.microbatches, [lambda count, line=lines[kind]: line[0] + line[1] * count for kind in kinds])
    return Arrangement(
        replicas=tuple(replica_of(row, layers, m) for (row, layers), m in zip(rows, counts, strict=True) if m)
    )


def _living_replicas(job: Job, speeds: Sequence[float]) -> list[tuple[list[tuple[int, ...]], tuple[int, ...]]]:
    places = [[job.place(d, s) for s in range(job.stages)] for d in range(job.replicas)]
    return [(row, job.layers_per_stage) for row in places if all(speeds[device] > 0 for g in row for device in g)]


def _nothing(bench: Workbench, health: Health) -> Arrangement | None:
    start = healthy_arrangement(bench.job)
    return None if set(health.dead) & set(start.devices) else start


def _drop(bench: Workbench, health: Health) -> Arrangement | None:
    rows = _living_replicas(bench.job, bench.job.speeds(health))
    return _even(bench.job, rows) if rows else None


def _greyhound(bench: Workbench, health: Health) -> Arrangement | None:
    speeds = bench.job.speeds(health)
    rows = _living_replicas(bench.job, speeds)
    return _by_speed(bench, rows, speeds) if rows else None


def _recycle(bench: Workbench, health: Health, *, by_speed: bool) -> Arrangement | None:
    job, speeds = bench.job, bench.job.speeds(health)
    groups = [
        [g if all(speeds[device] > 0 for device in g) else () for g in (job.place(d, s) for s in range(job.stages))]
        for d in range(job.replicas)
    ]
    return _shared(job, groups, job.layers_per_stage, speeds, by_speed=by_speed)


def _shared(
    job: Job,
    groups: Sequence[Sequence[tuple[int, ...]]],
    layers: tuple[int, ...],
    speeds: Sequence[float],
    *,
    by_speed: bool,
) -> Arrangement | None:
    """Every stage's micro-batches among the groups that it has left. None where it has none."""
    begins = equal_layers(job.microbatches, job.replicas)
    loads = []
    for stage in range(len(layers)):
        rates = [
            0.0 if not row[stage] else math.prod(group_of(row[stage], speeds)) if by_speed else 1.0 for row in groups
        ]
        if not any(rates):
            return None
        loads.append(_loads(begins, rates))
    if all(row == begins for row in loads):
        return _even(job, [(row, layers) for row in groups])
    return Arrangement(
        replicas=tuple(replica_of(row, layers, m) for row, m in zip(groups, begins, strict=True)), loads=tuple(loads)
    )


def _loads(begins: Sequence[int], rates: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches by rate so that the slowest is done as soon as it can be; as few as can be leave their replica."""
    ends = [lambda count, rate=rate: count / rate if rate else math.inf for rate in rates]
    counts = earliest(sum(begins), ends)
    slowest = max(count / rate for count, rate in zip(counts, rates, strict=True) if rate)
    # What stays at home without making the slowest slower stays there.
    most = [int(slowest * rate * (1 + 1e-12)) for rate in rates]
    kept = [min(begin, limit) for begin, limit in zip(begins, most, strict=True)]
    more = [
        lambda count, rate=rate, limit=limit, at=at: (at + count) / rate if rate and at + count <= limit else math.inf
        for rate, limit, at in zip(rates, most, kept, strict=True)
    ]
    added = earliest(sum(begins) - sum(kept), more)
    return tuple(at + count for at, count in zip(kept, added, strict=True))


def _oobleck(bench: Workbench, health: Health, *, by_speed: bool) -> Arrangement | None:
    job, speeds = bench.job, bench.job.speeds(health)
    used = job.tensor * job.stages * job.replicas
    nodes = [range(first, min(first + job.devices_per_node, used)) for first in range(0, used, job.devices_per_node)]
    living = [node for node in nodes if all(speeds[device] > 0 for device in node)]
    pools = [living]
    if by_speed:
        pools.append([node for node in living if all(speeds[device] == 1 for device in node)])
    best: tuple[float, Arrangement] | None = None
    for pool in pools:
        for rows in _templates(job, pool):
            made = _by_speed(bench, rows, speeds) if by_speed else _even(job, rows)
            seconds = bench.price(made, health, usual=True)
            if math.isfinite(seconds) and (best is None or seconds < best[0]):
                best = (seconds, made)
    return None if best is None else best[1]


def _templates(job: Job, nodes: Sequence[range]) -> list[list[tuple[list[tuple[int, ...]], tuple[int, ...]]]]:
    """Pipelines of whole nodes that cover all of them: as many as fit, of even sizes or the last smaller."""
    groups = [[tuple(node[at : at + job.tensor]) for at in range(0, len(node), job.tensor)] for node in nodes]
    if not nodes:
        return []
    out = []
    most = min(len(nodes), 2 * job.replicas)
    # Templates of few sizes, as they are planned ahead: numbers of pipelines around the job's own.
    for count in sorted({max(1, round(most * share / 16)) for share in range(1, 17)}):
        even = [len(nodes) // count + (index < len(nodes) % count) for index in range(count)]
        whole = -(-len(nodes) // count)
        rest = [min(whole, len(nodes) - at) for at in range(0, len(nodes), whole)]
        for sizes in {tuple(even), tuple(rest)}:
            rows, at = [], 0
            for size in sizes:
                row = [g for node in groups[at : at + size] for g in node]
                at += size
                # Where a node holds several replicas it stays divided so.
                parts = max(1, len(row) // job.stages) if job.devices_per_node > job.tensor * job.stages else 1
                step = len(row) // parts
                rows += [row[i : i + step] for i in range(0, step * parts, step)]
            if all(len(row) <= job.layers for row in rows):
                out.append([(row, equal_layers(job.layers, len(row))) for row in rows])
    return out


def repartitioned(layers: Sequence[int], before: Sequence[float], after: Sequence[float]) -> tuple[int, ...]:
    """ResiHP's layers per stage when stage capacities change: floor(L * new / old), at least 1 where a group is left,
    then each layer left over to the stage of least (L + 1) / capacity, each too many from that of most L / capacity."""
    counts = [
        max(1, int(count * new / old * (1 + 1e-12))) if new > 0 else 0
        for count, old, new in zip(layers, before, after, strict=True)
    ]
    while sum(counts) < sum(layers):
        counts[min((s for s in range(len(counts)) if after[s] > 0), key=lambda s: ((counts[s] + 1) / after[s], s))] += 1
    while sum(counts) > sum(layers):
        counts[max((s for s in range(len(counts)) if counts[s] > 1), key=lambda s: (counts[s] / after[s], -s))] -= 1
    return tuple(counts)


def _resihp(bench: Workbench, health: Health) -> Arrangement | None:
    job, speeds = bench.job, bench.job.speeds(health)
    degrees = [degree for degree in job.degrees if degree & (degree - 1) == 0 and degree <= job.tensor]
    groups = [[best_group(job.place(d, s), speeds, degrees) for s in range(job.stages)] for d in range(job.replicas)]
    alive = [stage for stage in range(job.stages) if any(row[stage] for row in groups)]
    groups = [[row[stage] for stage in alive] for row in groups]
    capacity = [[math.prod(group_of(g, speeds)) if g else 0.0 for g in row] for row in groups]
    old = [float(job.tensor)] * len(alive)
    # The published rule is uniform over replicas; which replica's capacities count is not told, so the best of these.
    lost = job.layers - sum(job.layers_per_stage[stage] for stage in alive)
    kept = [job.layers_per_stage[stage] for stage in alive]
    kept[0] += lost
    choices = {
        repartitioned(kept, old, old),
        repartitioned(kept, old, [min((row[s] for row in capacity if row[s]), default=0.0) for s in range(len(alive))]),
        repartitioned(kept, old, [sum(row[s] for row in capacity) / job.replicas for s in range(len(alive))]),
    }
    made: list[Arrangement] = []
    for layers in sorted(choices):
        found = _shared(job, groups, layers, speeds, by_speed=True)
        made += [found] if found is not None else []
        whole = [(row, layers) for row in groups if all(row)]
        made += [_by_speed(bench, whole, speeds)] if whole else []
    priced = [(bench.price(one, health, usual=True), index, one) for index, one in enumerate(made)]
    best = min(priced, default=(math.inf, 0, None))
    return best[2] if math.isfinite(best[0]) else None


POLICIES: Mapping[str, Policy] = {
    "nothing": _nothing,
    "drop": _drop,
    "greyhound": _greyhound,
    "recycle": lambda bench, health: _recycle(bench, health, by_speed=False),
    "recycle+": lambda bench, health: _recycle(bench, health, by_speed=True),
    "oobleck": lambda bench, health: _oobleck(bench, health, by_speed=False),
    "oobleck+": lambda bench, health: _oobleck(bench, health, by_speed=True),
    "resihp": _resihp,
}

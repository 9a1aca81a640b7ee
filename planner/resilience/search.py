"""The search for an arrangement: every one for few devices, else starts of many kinds, the best of them improved."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...plans import Arrangement, Health, Infeasible
from .exhaustive import MOST_GROUPS, best_of_all
from .groups import best_group, node_options
from .job import Job
from .shares import shared_out
from .workbench import Group, Workbench, group_of, kinds_of, replica_of

__all__ = ["HUGE_JOB", "Found", "candidates", "settle"]

# How many starts are improved, and how many exchanges each may try at 256 devices: fewer where there are more.
_IMPROVED, _EXCHANGES, _LEAST_EXCHANGES = 2, 120, 12
# Other numbers of replicas that are tried, against the job's own.
_REPLICAS = (0.5, 0.625, 0.75, 0.875, 1.125, 1.25, 1.5, 2.0)
_FEW_REPLICAS, _MANY_DEVICES = (0.75, 1.25, 2.0), 1024
# Beyond so many devices only what keeps the number of stages is tried, and nothing is exchanged.
HUGE_JOB = 8192

Groups = list[list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An arrangement and the seconds of its step; `origin` says what made it."""

    arrangement: Arrangement
    step_s: float
    origin: str


def candidates(bench: Workbench, health: Health) -> list[Found]:
    """Arrangements for these devices, the fastest first; Infeasible where none fits. The first is the best for up to
    8 devices alive."""
    job = bench.job
    speeds = bench.job.speeds(health)
    alive = sum(speed > 0 for speed in speeds)
    found: list[Found] = []
    if alive <= MOST_GROUPS:
        best = best_of_all(bench, speeds)
        found += [] if best is None else _settled(bench, best[0], speeds, "all")
    seen: dict[tuple, Groups] = {}
    for origin, groups in _starts(job, speeds):
        key = tuple(sorted(tuple(sorted(kinds_of(row, speeds))) for row in groups if row))
        if key not in seen:
            seen[key] = groups
            found += _settled(bench, groups, speeds, origin)
    if MOST_GROUPS < alive <= HUGE_JOB:
        for start in sorted(found, key=lambda one: one.step_s)[:_IMPROVED]:
            groups = [list(replica.groups) for replica in start.arrangement.replicas]
            found += _settled(bench, _exchanged(bench, groups, speeds), speeds, "exchanged")
    if not found:
        raise _infeasible(job, speeds)
    return sorted(found, key=lambda one: (one.step_s, one.origin != "kept", one.arrangement.digest()))


def settle(bench: Workbench, groups: Groups, speeds: Sequence[float]) -> tuple[Arrangement, float] | None:
    """The best layers, order and micro-batches for replicas of these groups; None where none fits the memory."""
    rows = [row for row in groups if row and len(row) <= bench.job.layers]
    kinds = [kinds_of(row, speeds) for row in rows]
    shared = shared_out(bench, kinds, bench.job.microbatches)
    if shared is None:
        return None
    counts, seconds = shared
    replicas = []
    for row, alike, count in zip(rows, kinds, counts, strict=True):
        if not count:
            continue
        order, layers, _ = bench.best(alike, count)
        replicas.append(replica_of(_in_order(row, order, speeds), layers, count))
    return Arrangement(replicas=tuple(replicas)), seconds


def _settled(bench: Workbench, groups: Groups, speeds: Sequence[float], origin: str) -> list[Found]:
    made = settle(bench, groups, speeds)
    return [] if made is None or math.isinf(made[1]) else [Found(arrangement=made[0], step_s=made[1], origin=origin)]


def _in_order(row: Sequence[tuple[int, ...]], order: Sequence[Group], speeds: Sequence[float]) -> list[tuple[int, ...]]:
    """The groups of `row` in an order of kinds; a group stays where it is, or near, if it can."""
    if kinds_of(row, speeds) == list(order):
        return list(row)
    places: dict[Group, list[int]] = {}
    for place, kind in enumerate(kinds_of(row, speeds)):
        places.setdefault(kind, []).append(place)
    out = []
    for stage, kind in enumerate(order):
        place = min(places[kind], key=lambda place: (abs(place - stage), place))
        places[kind].remove(place)
        out.append(row[place])
    return out


def _starts(job: Job, speeds: Sequence[float]) -> Iterator[tuple[str, Groups]]:
    """Replicas of many kinds: each group resized in its place, nodes regrouped, slow with slow, evenly mixed, and
    without the slowest groups."""
    kept = [[best_group(job.place(d, s), speeds, job.degrees) for s in range(job.stages)] for d in range(job.replicas)]
    spare = _spare_groups(job, speeds)
    yield "kept", [[group for group in row if group] for row in kept]
    yield "spares", _filled([[group for group in row if group] for row in kept], spare, job.stages, speeds)
    whole = [
        [tuple(d for d in job.place(r, s) if speeds[d] > 0) for s in range(job.stages)] for r in range(job.replicas)
    ]
    yield "slow kept", [[g for g in row if len(g) in job.degrees] for row in whole]
    for name, pool in _pools(job, speeds, [g for row in kept for g in row if g] + spare):
        capacities = [-len(g) * kind[1] for g, kind in zip(pool, kinds_of(pool, speeds), strict=True)]
        ranked = [g for _, g in sorted(zip(capacities, pool, strict=True))]
        drops = (1, 2, job.stages) if job.devices < _MANY_DEVICES else (job.stages,)
        sizes = sorted({len(ranked), *(len(ranked) - drop for drop in drops), _worth(ranked, speeds)})
        for size in (size for size in sizes if 0 < size <= len(ranked)):
            for how, groups in _shapes(ranked[:size], job, speeds):
                yield f"{name}, {how}", groups


def _worth(ranked: Sequence[tuple[int, ...]], speeds: Sequence[float]) -> int:
    """How many groups are at least half as fast as the fastest."""
    capacities = [size * speed for size, speed in kinds_of(ranked, speeds)]
    return sum(capacity >= 0.5 * capacities[0] for capacity in capacities)


def _spare_groups(job: Job, speeds: Sequence[float]) -> list[tuple[int, ...]]:
    """Groups of the devices that the healthy job does not use."""
    used, out = job.tensor * job.stages * job.replicas, []
    for first in range(used, job.devices, job.tensor):
        members = range(first, min(first + job.tensor, job.devices))
        group = best_group([d for d in members if job.node(d) == job.node(first)], speeds, job.degrees)
        out += [group] if group else []
    return out


def _filled(kept: Groups, spare: list[tuple[int, ...]], stages: int, speeds: Sequence[float]) -> Groups:
    """Spare groups take the place of lost ones, then of those that they are faster than."""
    pool = sorted(spare, key=lambda g: (-len(g) * group_of(g, speeds)[1], g))
    out = [list(row) for row in kept]
    for row in out:
        while pool and len(row) < stages:
            row.append(pool.pop(0))
    worst = sorted(
        ((len(g) * group_of(g, speeds)[1], d, s) for d, row in enumerate(out) for s, g in enumerate(row)),
    )
    for capacity, d, s in worst:
        if pool and len(pool[0]) * group_of(pool[0], speeds)[1] > capacity:
            out[d][s] = pool.pop(0)
    return out


def _pools(
    job: Job, speeds: Sequence[float], kept: list[tuple[int, ...]]
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """The groups in their places, and those of every node regrouped where it has lost something."""
    yield "in place", kept
    nodes: dict[int, list[int]] = {}
    for device in range(job.devices):
        nodes.setdefault(job.node(device), []).append(device)
    hurt = {node for node, devices in nodes.items() if any(speeds[d] < 1 for d in devices)}
    whole = [g for g in kept if job.node(g[0]) not in hurt]
    # Of each node the groups of most capacity, and of those as many or as few as there were.
    for name, sign in (("regrouped, few", 1), ("regrouped, many", -1)):
        pool = list(whole)
        for node in sorted(hurt):
            options = node_options(nodes[node], speeds, job.degrees)
            capacity = [sum(len(g) * group_of(g, speeds)[1] for g in groups) for groups in options]
            near = [g for g, c in zip(options, capacity, strict=True) if c >= max(capacity) * (1 - 1e-9)]
            pool += min(near, key=lambda groups: (sign * len(groups), groups))
        yield name, pool


def _shapes(ranked: list[tuple[int, ...]], job: Job, speeds: Sequence[float]) -> Iterator[tuple[str, Groups]]:
    """Replicas of ranked groups: as many stages as before, other numbers of replicas, like groups together or mixed."""
    stages = job.stages
    chunks = [ranked[at : at + stages] for at in range(0, len(ranked), stages)]
    yield "alike", chunks
    if job.devices > HUGE_JOB:
        yield "mixed", _mixed(ranked, len(chunks), speeds)
        return
    shares = _REPLICAS if job.devices < _MANY_DEVICES else _FEW_REPLICAS
    counts = {len(chunks), len(chunks) - 1, job.replicas, *(round(len(chunks) * share) for share in shares)}
    for count in sorted(count for count in counts if 0 < count <= len(ranked)):
        sizes = [len(ranked) // count + (index < len(ranked) % count) for index in range(count)]
        even, at = [], 0
        for size in sizes:
            even.append(ranked[at : at + size])
            at += size
        yield f"{count} alike", even
        yield f"{count} mixed", _mixed(ranked, count, speeds)


def _mixed(ranked: list[tuple[int, ...]], count: int, speeds: Sequence[float]) -> Groups:
    """Each group, the fastest first, to the replica of least capacity among those of fewest groups."""
    rows: Groups = [[] for _ in range(count)]
    heap = [(0, 0.0, index) for index in range(count)]
    for group in ranked:
        size, total, least = heap[0]
        rows[least].append(group)
        heapq.heapreplace(heap, (size + 1, total + len(group) * group_of(group, speeds)[1], least))
    return rows


def _exchanged(bench: Workbench, groups: Groups, speeds: Sequence[float]) -> Groups:
    """Exchange groups of unlike kinds between unlike replicas, or move one over, while the step gets shorter."""
    best = settle(bench, groups, speeds)
    tried = 0
    improved = best is not None
    while improved and best is not None:
        improved = False
        for changed in _neighbours(groups, speeds):
            tried += 1
            if tried > max(_LEAST_EXCHANGES, _EXCHANGES * 256 // len(speeds)):
                return groups
            made = settle(bench, changed, speeds)
            if made is not None and made[1] < best[1] * (1 - 1e-9):
                groups, best, improved = changed, made, True
                break
    return groups


def _neighbours(groups: Groups, speeds: Sequence[float]) -> Iterator[Groups]:
    """One exchange or move for each pair of kinds of replicas and kinds of groups in them."""
    kinds = [tuple(sorted(kinds_of(row, speeds))) for row in groups]
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    seen: set[tuple] = set()
    for a in sorted(first.values()):
        for b in range(len(groups)):
            if a == b:
                continue
            for i, left in enumerate(groups[a]):
                mine = group_of(left, speeds)
                key = (kinds[a], kinds[b], mine)
                if key not in seen and len(groups[a]) > 1:
                    seen.add(key)
                    yield _with(groups, {a: groups[a][:i] + groups[a][i + 1 :], b: [*groups[b], left]})
                for j, right in enumerate(groups[b]):
                    other = group_of(right, speeds)
                    pair = (*key, other)
                    if mine > other and pair not in seen:
                        seen.add(pair)
                        changed_a = [*groups[a][:i], right, *groups[a][i + 1 :]]
                        yield _with(groups, {a: changed_a, b: [*groups[b][:j], left, *groups[b][j + 1 :]]})


def _with(groups: Groups, rows: dict[int, list[tuple[int, ...]]]) -> Groups:
    return [list(rows.get(index, row)) for index, row in enumerate(groups)]


def _infeasible(job: Job, speeds: Sequence[float]) -> Infeasible:
    """Which limit binds, by how much, and the way out."""
    alive = sum(speed > 0 for speed in speeds)
    need = math.fsum(job.state_bytes)
    have = alive * job.memory_bytes
    if alive == 0:
        return Infeasible("'health' must leave a device alive, got none; wait for devices or restart elsewhere")
    if need > have:
        return Infeasible(
            f"'memory' must hold the model's state on the devices that live, got {have:.4g} bytes on {alive} devices "
            f"where {need:.4g} are needed, {need - have:.4g} more; add devices or spares, or keep less state"
        )
    return Infeasible(
        f"'degrees' and 'memory' must let groups hold the stages and one micro-batch, got degrees {job.degrees} on "
        f"{alive} devices of {job.memory_bytes:.4g} bytes and found no arrangement that does; allow more degrees, "
        "recompute, or add devices"
    )

"""The best arrangement of few devices, by looking at every one that is not beaten by another or by a bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .groups import node_options
from .job import Job
from .shares import shared_out
from .workbench import Group, Workbench, group_of

__all__ = ["MOST_GROUPS", "best_of_all"]

MOST_GROUPS = 8

Pool = tuple[tuple[int, ...], ...]


def best_of_all(bench: Workbench, speeds: Sequence[float]) -> tuple[list[list[tuple[int, ...]]], float] | None:
    """Groups of each replica and the seconds of a step; None where no arrangement fits the memory.

    Every way to form groups in each node, and every way to make replicas of them. How many replicas there are, and how
    many stages each has, is open.
    """
    job = bench.job
    best: tuple[float, tuple, Pool] | None = None
    for pool in _pools(job, speeds):
        kinds = tuple(sorted((group_of(group, speeds) for group in pool), reverse=True))
        # All devices of the pool at work all the time.
        least = job.work_s * job.microbatches / sum(degree * speed for degree, speed in kinds)
        if best is not None and least >= best[0] * (1 - 1e-12):
            continue
        for parts in _partitions(kinds, job.layers):
            found = shared_out(bench, parts, job.microbatches)
            if found is not None and found[1] < (best[0] * (1 - 1e-12) if best else float("inf")):
                best = (found[1], parts, pool)
    if best is None:
        return None
    seconds, parts, pool = best
    left = sorted(pool, key=lambda group: (group_of(group, speeds), [-device for device in group]), reverse=True)
    replicas: list[list[tuple[int, ...]]] = []
    for part in parts:
        taken = []
        for kind in part:
            group = next(group for group in left if group_of(group, speeds) == kind)
            left.remove(group)
            taken.append(group)
        replicas.append(taken)
    return replicas, seconds


def _pools(job: Job, speeds: Sequence[float]) -> Iterator[Pool]:
    """All ways to form groups in all nodes, those of most capacity first."""
    nodes = [
        range(first, min(first + job.devices_per_node, job.devices))
        for first in range(0, job.devices, job.devices_per_node)
    ]
    options = [node_options(node, speeds, job.degrees) for node in nodes]
    found: dict[tuple[Group, ...], Pool] = {}
    for choice in itertools.product(*options):
        pool = tuple(group for groups in choice for group in groups)
        if pool:
            found.setdefault(tuple(sorted(group_of(group, speeds) for group in pool)), pool)
    yield from (
        pool for _, pool in sorted(((-sum(k * p for k, p in kinds), kinds), pool) for kinds, pool in found.items())
    )


def _partitions(kinds: tuple[Group, ...], most: int) -> Iterator[tuple[tuple[Group, ...], ...]]:
    """All ways to share groups among replicas of at most `most` stages that differ in kinds; kinds are sorted."""
    yield from _parts(kinds, most, ())


def _parts(kinds: tuple[Group, ...], most: int, least: tuple[Group, ...]) -> Iterator[tuple[tuple[Group, ...], ...]]:
    if not kinds:
        yield ()
        return
    first, rest = kinds[0], kinds[1:]
    # The first group's replica: with every choice of others that differs; replicas come in falling order of kinds.
    seen = set()
    for size in range(min(most, len(kinds))):
        for others in itertools.combinations(range(len(rest)), size):
            part = (first, *(rest[index] for index in others))
            if part in seen or (least and part > least):
                continue
            seen.add(part)
            left = tuple(kind for index, kind in enumerate(rest) if index not in others)
            for more in _parts(left, most, part):
                yield (part, *more)

"""Plans made ahead: for every single failure, every lost node and the likeliest double failures, found in milliseconds.

Replicas are alike, and so are the devices of a group: failures that only differ in that have one entry, and what is
found is put onto the devices in question.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...plans import Arrangement, Health, Infeasible, Replica
from .job import Job
from .replan import Replanned, replan_job
from .workbench import Workbench

__all__ = ["Contingency", "canonical"]

Key = tuple


@dataclass(slots=True, kw_only=True)
class Contingency:
    """The table for one job, from its healthy arrangement on. What has no plan at all is kept as the reason why."""

    job: Job
    bench: Workbench
    horizon_s: float | None = None
    table: dict[Key, Replanned | str] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, *, doubles: int = 16, horizon_s: float | None = None) -> Contingency:
        """All single devices, all single nodes, and the `doubles` kinds of two devices that most pairs are of."""
        made = cls(job=job, bench=Workbench(job), horizon_s=horizon_s)
        for health in _singles(job):
            made.add(health)
        for health in _pairs(job, doubles):
            made.add(health)
        return made

    def add(self, health: Health) -> None:
        """Plan for one state of the devices, unless a state that differs in names only is there."""
        key, order = canonical(self.job, health)
        if key in self.table:
            return
        here = {device: place for place, device in enumerate(order)}
        same = Health.of({here[device]: speed for device, speed in health.speeds})
        try:
            self.table[key] = replan_job(self.job, same, horizon_s=self.horizon_s, bench=self.bench)
        except Infeasible as error:
            self.table[key] = str(error)

    def find(self, health: Health | Mapping[int, float]) -> Replanned | None:
        """The plan for this state, None where none was made ahead; Infeasible where it was and there is none."""
        health = Health.of(health, self.job.devices)
        key, order = canonical(self.job, health)
        found = self.table.get(key)
        if isinstance(found, str):
            raise Infeasible(found)
        return None if found is None else replace(found, arrangement=_placed(found.arrangement, order))


def canonical(job: Job, health: Health) -> tuple[Key, list[int]]:
    """What is the same for failures that differ only in names, and the device that stands at each place of it.

    Devices change places within their group; replicas (as many as whole nodes hold) with each other.
    """
    speeds = job.speeds(health)
    used = job.tensor * job.stages * job.replicas
    unit = math.lcm(job.tensor * job.stages, job.devices_per_node)
    size = unit if used % unit == 0 else used
    hurt = {device // size for device, _ in health.speeds if device < used}
    rows: list[tuple[tuple[float, ...], list[int]]] = []
    for number in sorted(hurt):
        order: list[int] = []
        for first in range(number * size, (number + 1) * size, job.tensor):
            members = range(first, first + job.tensor)
            order += sorted(members, key=lambda device: (speeds[device], device))
        rows.append((tuple(speeds[device] for device in order), order))
    rows.sort()
    whole = [device for n in range(used // size) if n not in hurt for device in range(n * size, (n + 1) * size)]
    spare = list(range(used, job.devices))
    places = [device for _, order in rows for device in order] + whole + spare
    return (tuple(row for row, _ in rows), tuple(speeds[device] for device in spare)), places


def _placed(arrangement: Arrangement, order: list[int]) -> Arrangement:
    return Arrangement(
        replicas=tuple(
            Replica(
                groups=tuple(tuple(order[device] for device in group) for group in replica.groups),
                layers=replica.layers,
                microbatches=replica.microbatches,
            )
            for replica in arrangement.replicas
        ),
        loads=arrangement.loads,
    )


def _singles(job: Job) -> Iterator[Health]:
    """Each device dead, each node dead; spares too."""
    for device in _unlike(job):
        yield Health.of({device: 0.0})
    for first in range(0, job.devices, job.devices_per_node):
        yield Health.of(dict.fromkeys(range(first, min(first + job.devices_per_node, job.devices)), 0.0))


def _unlike(job: Job) -> list[int]:
    """One device of each group of the first replicas, and the spares: all others are like one of them."""
    used = job.tensor * job.stages * job.replicas
    unit = math.lcm(job.tensor * job.stages, job.devices_per_node)
    size = unit if used % unit == 0 else used
    return [*range(0, size, job.tensor), *range(used, job.devices)]


def _pairs(job: Job, most: int) -> list[Health]:
    """Of each kind of two dead devices one example, the kinds of most pairs first."""
    first = _unlike(job)
    used = job.tensor * job.stages * job.replicas
    unit = math.lcm(job.tensor * job.stages, job.devices_per_node)
    size = unit if used % unit == 0 else used
    counts: Counter[Key] = Counter()
    example: dict[Key, Health] = {}
    # Partners within the same replicas, one by one, and in the next ones, of which there are so many.
    for a in first:
        for b in itertools.chain(range(size), range(size, min(2 * size, used))):
            if a == b:
                continue
            health = Health.of({a: 0.0, b: 0.0})
            key, _ = canonical(job, health)
            counts[key] += 1 if b < size else used // size - 1
            example.setdefault(key, health)
    ranked = sorted(counts, key=lambda key: (-counts[key], key))
    return [example[key] for key in ranked[:most]]

"""Which devices could work on, on which mesh: the candidates of a replan, before anything is priced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...plans.clusters import Cluster
from ...plans.errors import RequestError
from ...plans.health import Health
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ..sharding.constraints import Constraint

__all__ = ["Choice", "Devices", "choices", "fitted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices that there are: those of a plan, by rank, then those that were added; the node of each."""

    nodes: tuple[int, ...]
    health: Health

    @classmethod
    def of(cls, plan: Plan, health: Health, added: Sequence[int] = ()) -> Devices:
        """The devices of `plan` and one more in each of the nodes that `added` names."""
        size = plan.mesh.size * (1 if plan.pipeline is None else plan.pipeline.ranks)
        if any(isinstance(node, bool) or not isinstance(node, int) or node < 0 for node in added):
            raise RequestError(f"'added' must have the node of each device that is added, from 0, got {tuple(added)}")
        per_node = plan.cluster.devices_per_node
        return cls(nodes=(*(rank // per_node for rank in range(size)), *added), health=health)

    @property
    def alive(self) -> tuple[int, ...]:
        """Those that live."""
        dead = set(self.health.dead)
        return tuple(device for device in range(len(self.nodes)) if device not in dead)

    def apart(self, one: int, other: int) -> int:
        """0 within a node, 1 between nodes."""
        return int(self.nodes[one] != self.nodes[other])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Devices, in rank order, on a mesh with a pipeline of `pipeline` ranks around it; `speed` of the slowest."""

    devices: tuple[int, ...]
    mesh: Mesh
    pipeline: int
    nodes: int
    speed: float

    @property
    def rate(self) -> float:
        """How fast all of them would be if the step were divided perfectly."""
        return len(self.devices) * self.speed

    @property
    def name(self) -> str:
        """The mesh in words."""
        return f"{self.pipeline} x {self.mesh}" if self.pipeline > 1 else str(self.mesh)

    def cluster(self, plan: Plan) -> Cluster:
        """The part of the plan's cluster that it uses."""
        memory = plan.cluster.memory_bytes
        if isinstance(memory, tuple):
            # Of a device that was added nothing is known but that it is of the same kind.
            memory = tuple(memory[device] if device < len(memory) else min(memory) for device in self.devices)
        return Cluster(
            device=plan.cluster.device,
            nodes=self.nodes,
            devices_per_node=len(self.devices) // self.nodes,
            links=plan.cluster.links,
            memory_bytes=memory,
        )


def choices(plan: Plan, devices: Devices, mesh: Mesh | None = None) -> list[Choice]:
    """Meshes of survivors at least as fast as each of the speeds that there are, those of most speed first; on `mesh`
    alone where one is given."""
    found = sorted(_choices(plan, devices, mesh), key=lambda one: (-one.rate, -len(one.devices), one.mesh.shape))
    if mesh is not None and not found and devices.alive:
        raise RequestError(
            f"'mesh' must be one for devices that are left, as many on each node, got {mesh} for "
            f"{len(devices.alive)}; leave it out"
        )
    return found


def _choices(plan: Plan, devices: Devices, mesh: Mesh | None) -> Iterator[Choice]:
    speeds = {device: devices.health.speed(device) for device in devices.alive}
    per_node = max((devices.nodes.count(node) for node in set(devices.nodes)), default=0)
    seen: set[tuple[int, ...]] = set()
    for least in sorted(set(speeds.values()), reverse=True):
        nodes: dict[int, list[int]] = {}
        for device, speed in speeds.items():
            if speed >= least:
                nodes.setdefault(devices.nodes[device], []).append(device)
        for count in range(1, per_node + 1):
            rows = [
                sorted(sorted(row, key=lambda device: (-speeds[device], device))[:count])
                for _, row in sorted(nodes.items())
                if len(row) >= count
            ]
            chosen = tuple(device for row in rows for device in row)
            if not chosen or chosen in seen:
                continue
            seen.add(chosen)
            slowest = min(speeds[device] for device in chosen)
            for pipeline, grid in _meshes(plan, len(rows), count) if mesh is None else _given(plan, mesh, len(chosen)):
                yield Choice(devices=chosen, mesh=grid, pipeline=pipeline, nodes=len(rows), speed=slowest)


def _given(plan: Plan, mesh: Mesh, total: int) -> Iterator[tuple[int, Mesh]]:
    """`mesh` of a pipeline rank, where it does for so many devices."""
    if total % mesh.size == 0 and (plan.pipeline is not None or total == mesh.size):
        yield total // mesh.size, mesh


def _meshes(plan: Plan, nodes: int, count: int) -> Iterator[tuple[int, Mesh]]:
    """Degrees for `nodes` times `count` devices, with the plan's own axes: the last within a node, the first over what
    is left."""
    names, total = plan.mesh.axis_names, nodes * count
    for pipeline in _pipelines(plan, nodes, total):
        rest = total // pipeline
        if len(names) == 1:
            yield pipeline, Mesh((rest,), names)
            continue
        for inner in sorted({count, plan.mesh.shape[-1]} if plan.cluster.nodes > 1 else set(_near(plan, rest))):
            middle = plan.mesh.shape[1:-1]
            outer, left = divmod(rest, inner * Mesh.of(middle).size if middle else inner)
            if not left and inner <= count and outer >= 1:
                yield pipeline, Mesh((outer, *middle, inner), names)


def _pipelines(plan: Plan, nodes: int, total: int) -> list[int]:
    """Pipeline degrees near the plan's own: it, one less, one more, all nodes, none."""
    if plan.pipeline is None:
        return [1]
    own = plan.pipeline.ranks
    return [degree for degree in sorted({own, own - 1, own + 1, nodes, 1}) if degree >= 1 and total % degree == 0]


def _near(plan: Plan, total: int) -> list[int]:
    """Sizes of the last axis in one node: those that divide, the nearest to the plan's own and all of it."""
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    return sorted(divisors, key=lambda size: abs(size - plan.mesh.shape[-1]))[:2] + [total]


def fitted(given: Sequence[str | Constraint], mesh: Mesh) -> list[Constraint]:
    """Constraints for a mesh on which axes may have shrunk to one device, along which nothing can be split."""
    found: list[Constraint] = []
    for one in given:
        limit = Constraint.parse(one, mesh.ndim) if isinstance(one, str) else one
        if not limit.forbids:
            open_ = (None if size == 1 else part for part, size in zip(limit.layout, mesh.shape, strict=True))
            limit = replace(limit, layout=tuple(open_))
        found.append(limit)
    return found

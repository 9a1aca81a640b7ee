"""Which wires the groups along a mesh axis really cross.

Rank order is row-major on the mesh, and a node is `devices_per_node` ranks in a row. All groups along an axis are taken
to be at work together, so every device of a node uses its own wire out, and `devices_per_link` devices share one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ..plans.clusters import Cluster, Link
from ..plans.errors import RequestError
from ..plans.meshes import Mesh
from .devices import Device, DeviceLink, load_device
from .fabrics import Tier, fabric_levels

__all__ = ["AxisLink", "axis_link", "check_size", "cluster_links", "pipeline_mesh", "torus_link"]

_INTRA_NAMES = ("intra_node", "intra-node", "intra")
_INTER_NAMES = ("inter_node", "inter-node", "inter", "nic")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLink:
    """Where the groups of `group_size` devices lie: on how many nodes, joined by what inside and between them, and
    which levels of switches above they cross."""

    group_size: int
    nodes: int
    intra: DeviceLink
    inter: DeviceLink
    members_per_node: int = 0
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        if self.group_size < 1 or not 1 <= self.nodes <= self.group_size:
            raise RequestError(f"'group_size' must be at least 1 and 'nodes' at most it, got {self.group_size!r} on "
                               f"{self.nodes!r} nodes; check the mesh axis")  # fmt: skip
        if self.members_per_node < 1:
            object.__setattr__(self, "members_per_node", self.group_size if self.nodes == 1 else 1)

    @property
    def kind(self) -> str:
        """'none' (a group of one), 'intra', 'inter' (one member per node) or 'hierarchical'."""
        if self.group_size == 1:
            return "none"
        if self.nodes == 1:
            return "intra"
        return "inter" if self.members_per_node == 1 else "hierarchical"


def check_size(cluster: Cluster, mesh: Mesh) -> None:
    """RequestError unless the mesh has exactly one rank per device of the cluster."""
    devices = cluster.nodes * cluster.devices_per_node
    if mesh.size != devices:
        raise RequestError(
            f"'mesh' must have one rank per device, got {mesh} = {mesh.size} ranks on {cluster.nodes} x "
            f"{cluster.devices_per_node} = {devices} devices; give a mesh or a cluster of the other's size"
        )


def pipeline_mesh(mesh: Mesh, ranks: int) -> Mesh:
    """All devices of a pipeline of `ranks`, each with a mesh like `mesh` on devices in a row; RequestError for more
    axes than a mesh can have."""
    name = next(name for name in ("pp", "pipeline", "stage_rank", "pp_") if name not in mesh.axis_names)
    return Mesh((ranks, *mesh.shape), (name, *mesh.axis_names))


def cluster_links(cluster: Cluster, device: Device) -> tuple[DeviceLink, DeviceLink]:
    """The links inside and between nodes: the sheet's, with the bandwidth and latency that the cluster's links give.

    A cluster's link is matched by name: 'intra_node' or the sheet's intra-node link, 'inter_node', 'nic' or the sheet's
    NIC. Its bandwidth is the wire's (bytes/s each way per device); the sheet's efficiency still applies.
    """
    intra, nic = device.intra_link, device.nic
    for link in cluster.links or ():
        name = link.name.lower()
        if name in _INTRA_NAMES or name == intra.name:
            intra = _overridden(intra, link)
        elif name in _INTER_NAMES or name == nic.name:
            nic = dataclasses.replace(_overridden(nic, link), devices_per_link=1)
        else:
            raise RequestError(
                f"'links' must be named intra_node, inter_node, {intra.name} or {nic.name}, got {link.name!r}; "
                "from the cluster; rename it"
            )
    return intra, nic


def axis_link(cluster: Cluster, mesh: Mesh, axis: int, device: Device | None = None) -> AxisLink:
    """The links that the groups along mesh axis `axis` cross; of unlike groups the one that spans most nodes.

    RequestError when mesh and cluster differ in size or the axis is missing. `device` defaults to the cluster's sheet.
    """
    check_size(cluster, mesh)
    if not 0 <= axis < mesh.ndim:
        raise RequestError(f"'axis' must be 0 to {mesh.ndim - 1} on mesh {mesh}, got {axis!r}; count from 0")
    intra, inter = cluster_links(cluster, device or load_device(cluster.device))
    nodes, members = _spread(mesh, axis, cluster.devices_per_node)
    stride = math.prod(mesh.shape[axis + 1 :])
    return AxisLink(
        group_size=mesh.shape[axis], nodes=nodes, members_per_node=members, inter=inter,
        intra=torus_link(intra, cluster.devices_per_node, members, stride) if intra.torus_dims else intra,
        tiers=_tiers(cluster, mesh, axis, nodes, members),
    )  # fmt: skip


def torus_link(link: DeviceLink, devices: int, size: int, stride: int) -> DeviceLink:
    """The wires that a group of `size` devices, `stride` apart, has of its own on a torus of `devices`.

    The torus is the one nearest to a cube, ranks along its last dim first. A group has the wires of every dim that it
    goes round; half of them where it lies on a line, since the way back is not closed.
    """
    shape = _torus_shape(devices, link.torus_dims)
    wires, below = 0.0, devices
    for extent in shape:
        below //= extent
        covered = min(max(stride * size / below, 1), extent) / min(max(stride / below, 1), extent)
        if covered > 1:
            closed = covered == extent and (extent >= link.torus_wrap or extent == 2)
            wires += 1.0 if closed else 0.5
    share = max(wires, 0.5) / link.torus_dims
    return dataclasses.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share, torus_dims=0)


def _torus_shape(devices: int, dims: int) -> tuple[int, ...]:
    """The factors of `devices` that are nearest to each other, the smallest first."""
    best: tuple[int, ...] = (*[1] * (dims - 1), devices)
    for first in range(1, round(devices ** (1 / dims)) + 1):
        if dims > 1 and devices % first == 0:
            shape = (first, *_torus_shape(devices // first, dims - 1))
            if max(shape) - min(shape) < max(best) - min(best):
                best = shape
    return tuple(sorted(best))


def _tiers(cluster: Cluster, mesh: Mesh, axis: int, nodes: int, members: int) -> tuple[Tier, ...]:
    """The levels above the nodes that the groups along `axis` cross."""
    levels, source = fabric_levels(cluster)
    found: list[Tier] = []
    for level in levels if nodes > 1 else ():
        spans, inside = _spread(mesh, axis, cluster.devices_per_node * level.nodes)
        if spans > 1:
            found.append(
                Tier(name=level.name, oversubscription=level.oversubscription, latency_s=level.latency_s, spans=spans,
                     nodes_inside=max(1, inside // members), members_inside=inside, source=source)
            )  # fmt: skip
    return tuple(found)


def _overridden(base: DeviceLink, link: Link) -> DeviceLink:
    return dataclasses.replace(
        base,
        bandwidth_bytes_per_s=float(link.bandwidth_bytes_per_s),
        latency_s=float(link.latency_s),
        source=f"the cluster's link {link.name!r}; efficiency and ramp: {base.source}",
    )


def _spread(mesh: Mesh, axis: int, devices_per_node: int) -> tuple[int, int]:
    """Nodes that the widest group along `axis` spans and the fewest members such a group has on one of them."""
    nodes = np.arange(mesh.size).reshape(mesh.shape) // devices_per_node
    groups = np.moveaxis(nodes, axis, -1).reshape(-1, mesh.shape[axis])  # rows are sorted: rank grows along an axis
    starts = np.concatenate([np.ones((len(groups), 1), bool), np.diff(groups, axis=1) > 0], axis=1)
    spans = starts.sum(axis=1)
    widest = int(spans.max())
    first = np.flatnonzero(starts[spans == widest].ravel())
    runs = np.diff(np.append(first, int((spans == widest).sum()) * mesh.shape[axis]))
    return widest, int(runs.min())

"""Where this process stands in a pipeline: its pipeline rank, the mesh of it, and the group that joins all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UNSET
from torch.distributed.device_mesh import DeviceMesh

from ..plans.errors import ReplayError
from ..plans.meshes import Mesh
from ..plans.plan import Plan

__all__ = ["AXIS", "RankMesh", "rank_mesh"]

# The device mesh's own axis of pipeline ranks, before the axes of the plan's mesh.
AXIS = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMesh:
    """A process of pipeline rank `rank`, at `coordinate` of its `mesh`, which `device_mesh` is made of.

    `across` joins pipeline ranks. Where these have different meshes (`mixed`) it joins all processes, and of each rank
    the first one `speaks`; else it joins those at one coordinate, and each speaks.
    """

    rank: int
    mesh: Mesh
    coordinate: tuple[int, ...]
    device_mesh: DeviceMesh
    across: Any
    mixed: bool
    processes: tuple[Sequence[int], ...]

    @property
    def speaks(self) -> bool:
        """Whether what is summed up over `across` takes in this process."""
        return not self.mixed or self.index == 0

    @property
    def index(self) -> int:
        """The number of this process within its pipeline rank."""
        return self.mesh.rank(self.coordinate)

    @property
    def device(self) -> torch.device:
        """The kind of device."""
        return torch.device(self.device_mesh.device_type)

    def by_rank(self, rows: list[Any]) -> list[Any]:
        """What was gathered over `across`, once for each pipeline rank."""
        return [rows[own[0]] for own in self.processes] if self.mixed else rows


def rank_mesh(plan: Plan, device_mesh: DeviceMesh | None) -> RankMesh:
    """This process's place in the pipeline of `plan`: on `device_mesh`, which has the axis 'pipeline' and then those of
    the plan's mesh, or, where ranks have different meshes, on one that all processes make here. ReplayError for another
    number of processes, or a device mesh of another shape."""
    assert plan.pipeline is not None
    meshes = plan.meshes()
    if plan.stage_meshes is not UNSET:
        return _mixed(meshes, tuple(plan.processes(rank) for rank in range(len(meshes))), device_mesh)
    shape = () if device_mesh is None else tuple(device_mesh.mesh.shape)
    names = (device_mesh.mesh_dim_names if device_mesh is not None else None) or ("",)
    if device_mesh is None or shape != (plan.pipeline.ranks, *meshes[0].shape) or names[0].partition("@")[0] != AXIS:
        raise ReplayError(
            f"'device_mesh' must have an axis '{AXIS}' of {plan.pipeline.ranks} and the plan's mesh {meshes[0]}, got "
            f"{'x'.join(map(str, shape))} with axes {names}; leave it out, or plan again"
        )
    within = device_mesh[tuple(names[1:])]
    place, coordinate = device_mesh.get_coordinate(), within.get_coordinate()
    assert place is not None and coordinate is not None
    return RankMesh(
        rank=place[0],
        mesh=meshes[0],
        coordinate=tuple(coordinate),
        device_mesh=within,
        across=device_mesh.get_group(names[0]),
        mixed=False,
        processes=tuple(tuple(row.flatten().tolist()) for row in device_mesh.mesh),
    )


def _mixed(meshes: tuple[Mesh, ...], processes: tuple[range, ...], device_mesh: DeviceMesh | None) -> RankMesh:
    wanted = " and ".join(map(str, meshes))
    if device_mesh is not None:
        raise ReplayError(
            f"'device_mesh' must be left out where pipeline ranks have different meshes ({wanted}), got one; leave it "
            "out"
        )
    size = processes[-1].stop
    if dist.get_world_size() != size:
        raise ReplayError(
            f"'plan' must be for as many ranks as run, got pipeline ranks of meshes {wanted}, {size} devices, for "
            f"{dist.get_world_size()} ranks; plan again for these"
        )
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    found: list[tuple[int, DeviceMesh]] = []
    for rank, (mesh, own) in enumerate(zip(meshes, processes, strict=True)):
        # All processes make all of them: groups are made together.
        grid = torch.tensor(list(own)).reshape(mesh.shape)
        made = DeviceMesh(device, grid, mesh_dim_names=mesh.axis_names)
        if dist.get_rank() in own:
            found.append((rank, made))
    rank, made = found[0]
    coordinate = made.get_coordinate()
    assert coordinate is not None
    return RankMesh(
        rank=rank,
        mesh=meshes[rank],
        coordinate=tuple(coordinate),
        device_mesh=made,
        across=dist.new_group(),
        mixed=True,
        processes=processes,
    )

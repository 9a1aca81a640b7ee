"""A plan on real processes: one per rank on this machine, over gloo, trained as a user would train it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from msgspec import UNSET
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ...passes.capture import capture
from ...passes.microbatches import microbatch
from ...passes.pipeline_runtime import parallelize_pipeline
from ...passes.rank_mesh import AXIS
from ...passes.runtime import parallelize
from ...plans.errors import CheckError
from ...plans.plan import Plan
from .check import Record, default_loss, in_float64, train_in_place, train_steps

__all__ = ["Build", "free_port", "train_on_gloo", "train_pipeline_on_gloo"]

# Gives (model, args, kwargs, outer loss or None for the usual one); the same on every rank.
Build = Callable[[], tuple[nn.Module, tuple, dict[str, Any], Callable | None]]
_TIMEOUT_S = 120


def train_on_gloo(
    build: Build, plan: Plan, *, wide: bool, inside: bool, steps: int, seed: int, accumulate: int = 1
) -> Record:
    """What `planner.check.train` records, from as many processes as the plan has ranks. `build` must be picklable.

    `wide` runs what it gives in float64, `inside` says that the loss is part of the plan. Raises CheckError with the
    first rank's message when a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "plan.json").write_bytes(plan.to_bytes())
        run = {"wide": wide, "inside": inside, "steps": steps, "seed": seed, "accumulate": accumulate}
        _spawn(_rank, (build, str(path), free_port(), plan.mesh.size, run), plan.mesh.size)
        return Record(values=torch.load(path / "record.pt", weights_only=True))


def train_pipeline_on_gloo(build: Build, plan: Plan, *, wide: bool, steps: int, seed: int) -> Record:
    """`train_on_gloo` for a plan with a pipeline, whose loss (by default `default_loss`) is inside: `model.step` on as
    many processes as it has pipeline ranks, each with its mesh. CheckError also where ranks that hold the same tensor
    differ."""
    assert plan.pipeline is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "plan.json").write_bytes(plan.to_bytes())
        size = plan.processes(plan.pipeline.ranks - 1).stop
        run = {"wide": wide, "steps": steps, "seed": seed}
        _spawn(_pipeline_rank, (build, str(path), free_port(), size, run), size)
        found = Record()
        for rank in range(plan.pipeline.ranks):
            for key, value in torch.load(path / f"record-{rank}.pt", weights_only=True).items():
                known = found.values.setdefault(key, value)
                if (known is None) != (value is None) or (known is not None and not torch.equal(known, value)):
                    raise CheckError(f"{' '.join(key)} must be equal on all pipeline ranks that hold it, it is not")
        return found


def _spawn(function: Callable[..., None], arguments: tuple, processes: int) -> None:
    try:
        mp.spawn(function, arguments, nprocs=processes)  # type: ignore[attr-defined]
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CheckError(f"a rank failed: {text[-1] if text else type(error).__name__}") from error


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(rank: int, port: int, size: int) -> None:
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT_S))


def _pipeline_rank(rank: int, build: Build, folder: str, port: int, size: int, run: dict[str, Any]) -> None:
    _start(rank, port, size)
    try:
        model, args, kwargs, given = build()
        loss = given or default_loss
        if run.pop("wide"):
            model, args, kwargs = in_float64(model, args, kwargs)
        plan = Plan.load(os.path.join(folder, "plan.json"))
        assert plan.pipeline is not None
        shape, names = (plan.pipeline.ranks, *plan.mesh.shape), (AXIS, *plan.mesh.axis_names)
        mixed = plan.stage_meshes is not UNSET
        mesh = None if mixed else init_device_mesh("cpu", shape, mesh_dim_names=names)
        one = microbatch(args, kwargs, plan.pipeline.microbatches)
        captured = capture(model, *one, loss=loss, recompute=plan.options.recompute)
        parallel = parallelize_pipeline(model, captured, plan, mesh, loss=loss, timeout_s=_TIMEOUT_S)
        record = train_steps(parallel, (args, kwargs), **run)
        firsts = [plan.processes(one).start for one in range(plan.pipeline.ranks)]
        if rank in firsts:
            torch.save(record.values, os.path.join(folder, f"record-{firsts.index(rank)}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rank(rank: int, build: Build, folder: str, port: int, size: int, run: dict[str, Any]) -> None:
    _start(rank, port, size)
    try:
        model, args, kwargs, loss = build()
        if run.pop("wide"):
            model, args, kwargs = in_float64(model, args, kwargs)
        plan = Plan.load(os.path.join(folder, "plan.json"))
        inner, outer = (loss, lambda out: out) if run.pop("inside") else (None, loss or default_loss)
        captured = capture(model, args, kwargs, loss=inner, recompute=plan.options.recompute)
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axis_names)
        parallel = parallelize(model, captured, plan, mesh, loss=inner)
        record = train_in_place(parallel, (args, kwargs), outer, **run)
        if rank == 0:
            torch.save(record.values, os.path.join(folder, "record.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()

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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..passes.capture import capture
from ..passes.runtime import parallelize
from ..plans.errors import CheckError
from ..plans.plan import Plan
from .check import Record, default_loss, in_float64, train_in_place

__all__ = ["Build", "train_on_gloo"]

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
        try:
            run = {"wide": wide, "inside": inside, "steps": steps, "seed": seed, "accumulate": accumulate}
            mp.spawn(_rank, (build, str(path), _free_port(), plan.mesh.size, run), nprocs=plan.mesh.size)  # type: ignore[attr-defined]
        except Exception as error:
            text = str(error).strip().splitlines()
            raise CheckError(f"a rank failed: {text[-1] if text else type(error).__name__}") from error
        return Record(values=torch.load(path / "record.pt", weights_only=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, build: Build, folder: str, port: int, size: int, run: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT_S))
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

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
from torch.distributed.tensor import DTensor

from ..passes.trees import flatten_call
from ..plans.errors import CheckError
from ..plans.plan import Plan
from .apply import apply
from .check import EPS, Record, default_loss

__all__ = ["Build", "train_on_gloo"]

# Gives (model, args, kwargs, outer loss or None for the usual one, loss inside the plan or None); the same on every rank.
Build = Callable[[], tuple[nn.Module, tuple, dict[str, Any], Callable | None, Callable | None]]
_TIMEOUT_S = 120


def train_on_gloo(build: Build, plan: Plan, *, steps: int, seed: int) -> Record:
    """What `planner.check.train` records, from as many processes as the plan has ranks. `build` must be picklable.

    Raises CheckError with the first rank's message when a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "plan.json").write_bytes(plan.to_bytes())
        try:
            mp.spawn(_rank, (build, str(path), _free_port(), plan.mesh.size, steps, seed), nprocs=plan.mesh.size)  # type: ignore[attr-defined]
        except Exception as error:
            text = str(error).strip().splitlines()
            raise CheckError(f"a rank failed: {text[-1] if text else type(error).__name__}") from error
        return Record(values=torch.load(path / "record.pt", weights_only=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, build: Build, folder: str, port: int, size: int, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        model, args, kwargs, outer, inner = build()
        plan = Plan.load(os.path.join(folder, "plan.json"))
        parallel = apply(plan, model, args, kwargs, loss=inner)
        record = _train(parallel, args, kwargs, outer or default_loss, steps=steps, seed=seed)
        if rank == 0:
            torch.save(record.values, os.path.join(folder, "record.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _train(model: nn.Module, args: tuple, kwargs: dict[str, Any], loss: Callable, *, steps: int, seed: int) -> Record:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=EPS, foreach=False) if trained else None
    record = Record()
    inputs, tree = flatten_call(args, kwargs)
    for step in range(steps):
        torch.manual_seed(seed + step)
        value = loss(model(*args, **kwargs))
        value.backward()
        record.put("loss", f"step {step}", value)
        for name, parameter in model.named_parameters():
            record.put("gradient", f"{name} step {step}", _whole(parameter.grad))
        for name, tensor in zip(tree.names, inputs, strict=True):
            record.put("input", f"{name} step {step}", tensor)
            if tensor.requires_grad:
                record.put("gradient", f"{name} step {step}", tensor.grad)
                tensor.grad = None
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        record.put("parameter", name, _whole(parameter))
    for name, buffer in model.named_buffers():
        record.put("buffer", name, _whole(buffer))
    return record


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor

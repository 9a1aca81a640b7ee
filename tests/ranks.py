"""What tests do on real ranks: `python tests/ranks.py JOB RANK SIZE FOLDER` runs a job as one of SIZE gloo processes.

A job yields (name, value) pairs; rank 0 writes them to FOLDER/results.json. JOB may be several, with commas between.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshwright
from meshwright.planner.checking.check import in_float64
from meshwright.specs import load_spec

Results = Iterator[tuple[str, Any]]
CLIP = 0.05
# Any plan will do.
QUICK: dict[str, Any] = {"time_limit_s": 10.0}


def llama() -> tuple[nn.Module, tuple, dict[str, Any]]:
    """The smallest Llama in float64, the same on every rank."""
    torch.manual_seed(0)
    return in_float64(*load_spec("llama-tiny", batch=4, seq_len=8).build())


def case_of(name: str) -> ModuleType:
    """A file of tests/cases."""
    return file_of(f"cases/{name}")


def file_of(name: str) -> ModuleType:
    """A file of tests."""
    spec = importlib.util.spec_from_file_location(Path(name).name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(model: nn.Module, args: tuple, kwargs: dict[str, Any], *, steps: int = 3) -> dict[str, Any]:
    """A user's training loop with clipped gradients: losses, gradient norms and the parameters after it."""
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for _ in range(steps):
        out = model(*args, **kwargs)
        loss = out if out.dim() == 0 else out.square().mean()
        loss.backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    held = {name.removeprefix("_orig_mod."): whole(p).detach() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), **held}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gap(want: dict[str, Any], have: dict[str, Any]) -> float:
    """Largest difference of two records; infinite when they hold other things."""
    if list(want) != list(have):
        return float("inf")
    return max(float((want[k] - have[k]).abs().max()) if want[k].numel() else 0.0 for k in want)


def message(call: Callable[[], Any]) -> str:
    """Type and text of the error that `call` raises; empty when it raises none."""
    try:
        call()
    except meshwright.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def eager(size: int, folder: Path) -> Results:
    """autoparallelize with inputs, and the plan of it saved and replayed."""
    model, args, kwargs = llama()
    want = train(copy.deepcopy(model), args, kwargs)
    parallel = meshwright.autoparallelize(model, args, kwargs, mesh=str(size), **QUICK)
    yield "same class", isinstance(parallel, type(model))
    yield "state dict names", list(parallel.state_dict()) == list(model.state_dict())
    yield (
        "sharded",
        sum(isinstance(p, DTensor) and any(q.is_shard() for q in p.placements) for p in parallel.parameters()),
    )
    yield "trained", gap(want, train(parallel, args, kwargs))
    yield "the model given is left alone", not any(isinstance(p, DTensor) for p in model.parameters())
    path = folder / f"plan-{dist.get_rank()}.json"
    parallel.plan.save(path)
    plan = meshwright.Plan.load(path)
    replayed: Any = meshwright.apply(plan, model, args, kwargs)
    yield "replayed", gap(want, train(replayed, args, kwargs))
    alone = copy.deepcopy(model)
    alone.load_state_dict({name: whole(tensor).detach() for name, tensor in replayed.state_dict().items()})
    alone(*args, **kwargs).backward()
    replayed.step(args)
    norms = [nn.utils.clip_grad_norm_(alone.parameters(), CLIP), replayed.clip_grad_norm_(CLIP)]
    found = [{n: whole(p.grad) for n, p in each.named_parameters()} for each in (alone, replayed)]
    yield "stepped", max(gap(*found), float((norms[0] - norms[1]).abs()))
    unmet = {"mesh": str(size), "memory_limit_bytes": 1}
    yield "no plan fits", message(lambda: meshwright.autoparallelize(model, args, kwargs, **unmet))
    small = case_of("101_accumulate_two_steps").build()
    other = meshwright.plan(*small, cluster="cpu:4", mesh="2x2")
    yield "more ranks", message(lambda: meshwright.apply(other, *small))
    grid = init_device_mesh("cpu", (size, 1))
    yield "another mesh", message(lambda: meshwright.apply(plan, model, args, kwargs, device_mesh=grid))


def lazily(size: int, folder: Path) -> Results:
    """autoparallelize without inputs: planned at the first call."""
    model, args, kwargs = llama()
    want = train(copy.deepcopy(model), args, kwargs)
    parallel = meshwright.autoparallelize(model, mesh=str(size), **QUICK)
    yield "parameters too early", message(lambda: list(parallel.parameters()))
    parallel(*args, **kwargs)
    yield "state dict names", list(parallel.state_dict()) == list(model.state_dict())
    yield "trained", gap(want, train(parallel, args, kwargs))


def compiled(size: int, folder: Path) -> Results:
    """torch.compile of the parallel model."""
    model, args, kwargs = llama()
    want = train(copy.deepcopy(model), args, kwargs)
    parallel = meshwright.autoparallelize(model, args, kwargs, mesh=str(size), **QUICK)
    yield "trained", gap(want, train(torch.compile(parallel), args, kwargs))


def clipped(size: int, folder: Path) -> Results:
    """Clipping by norms over DTensors of several placements: the planner's own, split and whole by turns."""
    case = case_of("102_clip_global_norm")
    for pins in ([], ["*weight = S(0)"], ["*weight = R", "*bias = S(0)"]):
        model, args, kwargs = in_float64(*case.build())
        parallel = meshwright.autoparallelize(model, args, kwargs, mesh=str(size), constraints=pins, **QUICK)
        for kind in (2.0, float("inf")):
            found = []
            for each in (model, parallel):
                each.zero_grad()
                each(*args, **kwargs).square().mean().backward()
                norm = whole(nn.utils.clip_grad_norm_(each.parameters(), CLIP, norm_type=kind))
                found.append({"norm": norm, **{n: whole(p.grad) for n, p in each.named_parameters()}})
            yield f"clipped by {kind} {pins}", gap(*found)


def accumulated(size: int, folder: Path) -> Results:
    """Two backward passes before the step: the gradients are summed."""
    case = case_of("101_accumulate_two_steps")
    for pins in ([], ["*weight = S(0)", "args.0 = S(0)"]):
        model, args, kwargs = in_float64(*case.build())
        parallel = meshwright.autoparallelize(model, args, kwargs, mesh=str(size), constraints=pins, **QUICK)
        for each in (model, parallel):
            for _ in range(case.STEPS):
                each(*args, **kwargs).square().mean().backward()
        want, have = ({n: whole(p.grad) for n, p in each.named_parameters()} for each in (model, parallel))
        yield f"gradients {pins}", gap(want, have)


class Gain(nn.Module):
    """A product, a bias and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain


def gain() -> tuple[nn.Module, tuple, dict[str, Any]]:
    torch.manual_seed(0)
    return Gain(), (torch.randn(4, 8),), {}


def saved(size: int, folder: Path) -> Results:
    """A distributed checkpoint of uneven and empty pieces, of the model and its optimizer, onto the same mesh."""
    for name, build, pins in (
        ("006", case_of("006_empty_shard_param").build, ["a.weight = S(0)", "scale = S(0)", "one = S(1)"]),
        ("143", case_of("143_replan_fewer_devices").build, ["*weight = S(0)", "*bias = S(0)"]),
        ("gain", gain, ["linear.weight = S(0)", "linear.bias = S(0)", "gain = S(0)"]),
    ):
        model, args, kwargs = in_float64(*build())
        alone = trained(copy.deepcopy(model), args, kwargs)[0]
        plan = meshwright.plan(model, args, kwargs, cluster=f"cpu:{size}", mesh=str(size), constraints=pins, **QUICK)
        first = meshwright.apply(plan, model, args, kwargs)
        want, optimizer = trained(first, args, kwargs)
        yield f"trained {name}", gap(alone, want)
        state, moments = get_state_dict(first, optimizer)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder / name)
        # Another model with other weights takes over where the first one stood.
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        second = meshwright.apply(plan, model, args, kwargs)
        other = optimizer_of(second)
        state, moments = get_state_dict(second, other)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder / name)
        set_state_dict(second, other, model_state_dict=state, optim_state_dict=moments)
        yield f"loaded {name}", gap(want, {n: whole(p).detach() for n, p in second.named_parameters()})
        pairs = ((first, optimizer), (second, other))
        yield f"one more step of {name}", gap(*(trained(m, args, kwargs, o)[0] for m, o in pairs))
        pieces = {n: list(p.to_local().shape) for n, p in first.named_parameters() if isinstance(p, DTensor)}
        everywhere: list[Any] = [None] * size
        dist.all_gather_object(everywhere, pieces)
        yield f"pieces {name}", everywhere


def resized(size: int, folder: Path) -> Results:
    """Inputs of other sizes, by a plan with a dynamic dim: captured once each, nothing is solved."""
    model, args, kwargs = in_float64(*gain())
    options: dict[str, Any] = {"mesh": str(size), "constraints": ["args.0 = S(0)", "gain = S(0)"], **QUICK}
    parallel = meshwright.autoparallelize(model, args, kwargs, dynamic={"x": {0: (2, 16)}}, **options)
    plan = parallel.plan
    for rows in (4, 3, 7, 2, 3):
        x = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        found = []
        for each in (model, parallel):
            each.zero_grad()
            each(x).square().mean().backward()
            found.append({n: whole(p.grad) for n, p in each.named_parameters()})
        yield f"gradients {rows}", gap(*found)
    yield "same plan", parallel.plan is plan
    yield "too many", message(lambda: parallel(torch.randn(17, 8, dtype=torch.float64)))


def trained(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    """The parameters after one step, and the optimizer."""
    optimizer = optimizer or optimizer_of(model)
    model(*args, **kwargs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {n: whole(p).detach().clone() for n, p in model.named_parameters()}, optimizer


JOBS = {job.__name__: job for job in (eager, lazily, compiled, clipped, accumulated, saved, resized)}
JOBS |= file_of("pipeline_jobs").JOBS


def main() -> None:
    jobs, rank, size, folder = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        results[job] = dict(JOBS[job](size, folder))
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

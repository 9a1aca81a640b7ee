"""What tests do with pipelines on real ranks; ranks.py runs it."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import meshwright
from meshwright.planner.apply import agreed
from meshwright.planner.zoo import named_schedule

Results = Iterator[tuple[str, Any]]
CLIP = 0.05
# Schedules and meshes, by the number of ranks.
CASES = {
    2: (("interleaved:2", "1"), ("1f1b", "1")),
    3: (("1f1b", "1"), ("zb-h1", "1")),
    4: (("zb-h1", "2"), ("1f1b", "2")),
}
# Meshes of the pipeline ranks that differ, by the number of ranks.
MIXED = {
    3: (("2", "1"), ("1", "2")),
    4: (("2", "1x2"), ("3", "1"), ("1", "2", "1"), ("1x2", "2")),
    8: (("4", "2x2"),),
}
FIRSTS = ("", "blocks.0", "blocks.1", "head")


def helpers() -> ModuleType:
    """tests/pipelines.py."""
    spec = importlib.util.spec_from_file_location("pipelines", Path(__file__).parent / "pipelines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    held = list(model.parameters()) or [torch.zeros(1)]  # a stage may have no parameters
    return torch.optim.AdamW(held, lr=1e-2, eps=1e-4)


def tied(size: int, schedule: str, mesh: str = "1", seed: int = 0) -> tuple[nn.Module, tuple, meshwright.Plan]:
    """A model with a tied weight, its batch, and a random plan with a pipeline over `size` ranks."""
    found = helpers()
    torch.manual_seed(0)
    model = found.Tied().double()
    args = found.batch_of(model, 8)
    ranks = size // int(mesh)
    order = named_schedule(schedule, ranks, 4)
    firsts = (FIRSTS if order.stages == 4 else ("", *FIRSTS[4 - order.stages + 1 :]))[: order.stages]
    plan = agreed(lambda: found.pipelined(model, args, mesh=mesh, schedule=order, seed=seed, firsts=firsts)[0])
    return model, args, plan


def alike(alone: nn.Module, parallel: nn.Module, args: tuple, optimizers: list, steps: int = 3) -> float:
    """Train both, with clipped gradients: the largest difference of losses, norms, gradients and parameters."""
    worst = 0.0
    for _ in range(steps):
        alone(*args).backward()
        loss = parallel.step(*args)  # type: ignore[operator]
        with torch.no_grad():
            worst = max(worst, float((alone(*args) - loss).abs()), gap(alone, parallel, gradients=True))
        want = nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        have = parallel.clip_grad_norm_(CLIP)  # type: ignore[operator]
        worst = max(worst, float((want - have).abs()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, gap(alone, parallel))
    return worst


def gap(alone: nn.Module, parallel: nn.Module, *, gradients: bool = False) -> float:
    """The largest difference of the parameters, or of their gradients, that this rank holds."""
    known = dict(alone.named_parameters())
    found = 0.0
    for name, parameter in parallel.named_parameters():
        want, have = (p.grad if gradients else p for p in (known[name], parameter))
        assert want is not None and have is not None
        found = max(found, float((want.detach() - whole(have)).abs().max()))
    return found


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def message(call: Any) -> str:
    try:
        call()
    except meshwright.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def piped(size: int, folder: Path) -> Results:
    """A tied weight whose stages are on one rank and a layer used on both; clipping, a checkpoint, what is refused, and
    ranks that fail."""
    model, args, plan = tied(size, "zb-v")
    alone, parallel = copy.deepcopy(model), meshwright.apply(plan, model, args, timeout_s=60)
    optimizers = [optimizer_of(alone), optimizer_of(parallel)]
    yield "trained", max(everywhere(alike(alone, parallel, args, optimizers)))
    yield "holders", everywhere(sorted(name for name, _ in parallel.named_parameters()))
    yield "same class", isinstance(parallel, type(model)) and parallel.plan is plan
    yield "rows", [[str(timed.action) for timed in row] for row in parallel.timelines()]
    yield "called", message(lambda: parallel(*args))
    uneven = tuple(torch.cat([a, a])[:10] for a in args)
    yield "batch of 10", max(everywhere(alike(alone, parallel, uneven, optimizers, steps=1)))
    yield "batch of 3", message(lambda: parallel.step(*(a[:3] for a in args)))
    second: Any = meshwright.apply(plan, emptied(model), args, timeout_s=60)
    yield from reloaded(alone, parallel, second, args, optimizers, folder)
    for _ in range(2):
        alone(*args).backward()
        parallel.step(args)
    yield "gradients of two steps", max(everywhere(gap(alone, parallel, gradients=True)))
    yield from failing(parallel, second, args)


def emptied(model: nn.Module) -> nn.Module:
    """A copy with other weights."""
    empty = copy.deepcopy(model)
    for parameter in empty.parameters():
        nn.init.zeros_(parameter)
    return empty


def reloaded(alone: nn.Module, first: Any, second: Any, args: tuple, optimizers: list, folder: Path) -> Results:
    """A distributed checkpoint of every rank's part, taken up by another model."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state, moments = get_state_dict(first, optimizers[1], options=flat)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder / "pipeline")
    optimizer = optimizer_of(second)
    state, moments = get_state_dict(second, optimizer, options=flat)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder / "pipeline")
    set_state_dict(second, optimizer, model_state_dict=state, optim_state_dict=moments, options=flat)
    yield "loaded", max(everywhere(gap(alone, second)))
    yield "trained on", max(everywhere(alike(alone, second, args, [optimizers[0], optimizer], steps=1)))
    # `first` goes on as `second` did.
    first.step(*args)
    first.clip_grad_norm_(CLIP)
    optimizers[1].step()
    optimizers[1].zero_grad()


def failing(broken: Any, waiting: Any, args: tuple) -> Results:
    """A rank that fails, and one that never comes: no rank waits for ever, and each says in which action it was."""
    if dist.get_rank() == 1:
        program, executor = next(iter(broken._meshwright.programs.values())), broken._meshwright.executor
        executor._run[program.graphs[1], "B"] = executor._run[program.graphs[1], "I"] = lambda given: 1 / 0
    began = time.monotonic()
    yield "a rank fails", everywhere(message(lambda: broken.step(*args)))
    yield "at once", max(everywhere(time.monotonic() - began)) < 30
    yield "after a failure", everywhere(message(lambda: broken.step(*args)))
    waiting._meshwright.channels.timeout = timedelta(seconds=1)
    yield "a rank is gone", everywhere(message(lambda: waiting.step(*args)) if dist.get_rank() == 0 else "")


def grid(size: int, folder: Path) -> Results:
    """A tied weight on several ranks; where there are four, stages on meshes of two."""
    for schedule, mesh in CASES[size]:
        for seed in range(2):
            model, args, plan = tied(size, schedule, mesh, seed)
            alone, parallel = copy.deepcopy(model), meshwright.apply(plan, model, args, timeout_s=60)
            optimizers = [optimizer_of(alone), optimizer_of(parallel)]
            yield f"trained {schedule} {seed}", max(everywhere(alike(alone, parallel, args, optimizers)))


def random_piped(size: int, folder: Path) -> Results:
    """Random cuts, placements, orders and plans."""
    import random

    found = helpers()
    for seed in range(8):
        rng = random.Random(100 * size + seed)
        torch.manual_seed(0)
        model = rng.choice([found.Twisted, found.Tied])().double()
        args = found.batch_of(model, 4)
        mesh = "2" if size == 4 and seed % 2 else "1"
        ranks = size // int(mesh)
        order = found.random_schedule(rng.randint(ranks, 5), ranks, rng.choice([2, 4]), rng)
        mode = rng.choice(["none", "pointwise", "block"])
        build = {"mesh": mesh, "schedule": order, "seed": seed, "recompute": mode}
        plan = agreed(lambda model=model, args=args, build=build: found.pipelined(model, args, **build)[0])
        alone, parallel = copy.deepcopy(model), meshwright.apply(plan, model, args, timeout_s=60)
        optimizers = [optimizer_of(alone), optimizer_of(parallel)]
        yield f"trained {seed}", max(everywhere(alike(alone, parallel, args, optimizers)))


def mixed_piped(size: int, folder: Path) -> Results:
    """Random cuts, placements, orders and plans, and ranks with different meshes."""
    import random

    found = helpers()
    for seed, meshes in enumerate(MIXED[size]):
        rng = random.Random(100 * size + seed)
        torch.manual_seed(0)
        model = [found.Tied, found.Twisted][seed % 2]().double()
        args = found.batch_of(model, 4)
        order = found.random_schedule(rng.randint(len(meshes), 5), len(meshes), rng.choice([2, 4]), rng)
        mode = rng.choice(["none", "pointwise", "block"])
        build = {"meshes": meshes, "schedule": order, "seed": seed, "recompute": mode}
        plan = agreed(lambda model=model, args=args, build=build: found.mixed(model, args, **build)[0])
        alone, parallel = copy.deepcopy(model), meshwright.apply(plan, model, args, timeout_s=60)
        optimizers = [optimizer_of(alone), optimizer_of(parallel)]
        yield f"trained {'/'.join(meshes)}", max(everywhere(alike(alone, parallel, args, optimizers)))
        yield f"rows {'/'.join(meshes)}", len(parallel.timelines())


JOBS = {job.__name__: job for job in (piped, grid, random_piped, mixed_piped)}

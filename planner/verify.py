"""The call behind `meshwright check`: plan (or take a plan, or draw random ones), run it, compare."""

from __future__ import annotations

import random as randomness
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..passes.capture import capture
from ..plans.clusters import Cluster
from ..plans.errors import RequestError
from ..plans.meshes import Mesh
from ..plans.plan import Plan
from .api import Draft, draft, plan_draft
from .apply import capture_for
from .check import CheckReport, Record, check_plan, compare, default_loss, in_float64, tolerance_of, train
from .gloo import Build, train_on_gloo
from .problem import Solution, Stats, evaluate
from .sampling import sample

__all__ = ["check", "random_plan", "usual_cluster"]

LossFunction = Callable[[Any], torch.Tensor]


def check(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh | str | None = None,
    plan: Plan | None = None,
    loss: LossFunction | None = None,
    random: int = 0,
    seed: int = 0,
    steps: int = 3,
    build: Build | None = None,
    **options: Any,
) -> CheckReport:
    """Whether the planned program computes what `model` computes: loss, gradients, buffers, parameters after AdamW steps.

    The plan is `plan`, or `random` random feasible ones, or the one that the planner chooses for `mesh`. `loss` is what the
    user applies to the model's output (default: its loss, a scalar itself, or a mean square). A model that is float32
    throughout is checked in float64. Ranks are simulated in this process; with `build` (see planner/gloo.py) they are real
    gloo processes. Other `options` are those of `plan`. The report is that of the worst plan tried.
    """
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise RequestError(
            "'model' must have weights to be checked, got one on the meta device; use a smaller model, e.g. a -tiny spec"
        )
    outer, given = loss or default_loss, dict(kwargs or {})
    if plan is not None:
        capture_for(plan, model, args, given, None)
        mesh = plan.mesh
    if mesh is None:
        raise RequestError("'mesh' must be given where there is no plan, got neither; e.g. mesh='2x2'")
    grid = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    model, args, given, reference = _reference(model, args, given, outer, steps, seed)
    options = {"cluster": usual_cluster(grid), **options, "mesh": grid}
    worst: CheckReport | None = None
    for found, prepared in _plans(model, args, given, plan, random, seed, options):
        captured = (
            prepared.captured
            if prepared and not prepared.blocks.cut
            else capture(model, args, given, recompute=found.options.recompute)
        )
        if build is not None:
            record = train_on_gloo(build, found, steps=steps, seed=seed)
            report = compare(reference, record, captured, tolerance_of(captured), grid.size, "gloo")
        else:
            report = check_plan(
                model, args, given, captured, found, loss=outer, steps=steps, seed=seed, reference=reference
            )
        if worst is None or (not report.equal, report.max_error) > (not worst.equal, worst.max_error):
            worst = report
    assert worst is not None
    return worst


def usual_cluster(mesh: Mesh) -> Cluster:
    """H100s, eight to a node where that fits, for a mesh that only counts devices."""
    size = mesh.size
    per_node = 8 if size % 8 == 0 else size
    return Cluster(device="h100-sxm", nodes=size // per_node, devices_per_node=per_node)


def _reference(
    model: nn.Module, args: Sequence[Any], kwargs: dict, loss: LossFunction, steps: int, seed: int
) -> tuple[nn.Module, tuple, dict, Record]:
    """The model in the widest precision it runs in, and what one process computes with it."""
    wide = in_float64(model, args, kwargs)
    try:
        return *wide, train(*wide, loss, steps=steps, seed=seed)
    except RuntimeError:
        # Some kernels have no float64: the model is checked as it is.
        return model, tuple(args), kwargs, train(model, args, kwargs, loss, steps=steps, seed=seed)


def _plans(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict,
    plan: Plan | None,
    count: int,
    seed: int,
    options: dict[str, Any],
) -> Any:
    if plan is not None:
        yield plan, None
        return
    if not count:
        prepared, solution = plan_draft(model, args, kwargs, **options)
        yield prepared.write(solution), prepared
        return
    settings = {k: v for k, v in options.items() if k not in ("time_limit_s", "gap", "solver")}
    recompute = ("none", "pointwise", "block")
    for index in range(count):
        prepared = draft(model, args, kwargs, **{**settings, "recompute": recompute[(seed + index) % 3]})
        yield random_plan(prepared, seed + index), prepared


def random_plan(prepared: Draft, seed: int) -> Plan:
    """A random plan among those that fit the memory limit."""
    problem, timeline, limit = prepared.formulation.problem, prepared.timeline, float(prepared.limit)
    moments: list[int] = []
    while True:
        rows = tuple(timeline.row(moment, limit) for moment in moments)
        choices = sample(replace(problem, rows=rows), randomness.Random(seed))
        profile = timeline.profile(choices)
        peak = int(profile.argmax())
        if profile[peak] <= limit or peak in moments:
            break
        moments.append(peak)
    value = evaluate(problem, choices)
    stats = Stats(
        nodes=len(problem.nodes),
        choices=sum(problem.sizes),
        kept_choices=sum(problem.sizes),
        sweeps=0,
        programs=0,
        columns=0,
    )
    solution = Solution(
        choices=choices, objective_s=value, bound_s=0.0, gap=1.0, status="random", seconds=0.0, stats=stats
    )
    return prepared.write(solution)

"""The call behind `meshwright check`: plan (or take a plan, or draw random ones), run it, compare."""

from __future__ import annotations

import contextlib
import random as randomness
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...passes.capture import capture
from ...passes.graph import Captured
from ...passes.lookup import PlanLookup
from ...passes.naming import op_name
from ...passes.recompute import Recompute
from ...plans.clusters import Cluster
from ...plans.errors import Infeasible, MeshwrightError, ReplayError, RequestError
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ..api import Draft, draft, plan_draft
from ..apply import capture_by, capture_for
from ..arguments import check_arguments
from ..fitting import needs_no_count
from ..sharding.capturing import Traces
from ..sharding.own_rules import OpRule
from ..solver.problem import Solution, Stats, evaluate
from ..solver.sampling import sample
from .check import CheckReport, Record, check_plan, compare, default_loss, in_float64, tolerance_of, train
from .gloo import Build, train_on_gloo

__all__ = ["check", "has_entries", "random_plan", "usual_cluster"]

LossFunction = Callable[[Any], torch.Tensor]
# How many random plans are counted before a limit is called too low for one.
_COUNTS = 5


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
    accumulate: int = 1,
    build: Build | None = None,
    pipeline: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    **options: Any,
) -> CheckReport:
    """Whether the planned program computes what `model` computes: loss, outputs, gradients, buffers, and parameters
    after AdamW steps of `accumulate` backward passes each.

    The plan is `plan`, or `random` random feasible ones, or the one that the planner chooses for `mesh`. `loss` is what
    the user applies to the model's output (default: its loss, a scalar itself, or a mean square). A model that is
    float32 throughout is checked in float64. Ranks are simulated in this process; with `build` (see gloo.py)
    they are real gloo processes. With `pipeline` ranks, each with `mesh`, the batch is cut into `microbatches` and the
    model into stages of equally many blocks, run by the schedule called `schedule`; a `plan` may have a pipeline of its
    own. Other `options` are those of `plan`. The report is that of the worst plan tried.
    """
    check_arguments(
        model=model, args=args, kwargs=kwargs, mesh=mesh, loss=loss, random=random, seed=seed, steps=steps,
        accumulate=accumulate, build=build, pipeline=pipeline, microbatches=microbatches, schedule=schedule, **options,
    )  # fmt: skip
    if plan is not None:
        check_arguments(plan=plan)
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise RequestError(
            "'model' must have weights to be checked, got one on the meta device; use a smaller one, e.g. a -tiny spec"
        )
    if pipeline is not None or microbatches is not None or (plan is not None and plan.pipeline is not None):
        from .verify_pipeline import check_pipeline

        grid = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        return check_pipeline(
            model, tuple(args), dict(kwargs or {}), mesh=grid, plan=plan, pipeline=pipeline, microbatches=microbatches,
            schedule=schedule, loss=loss, random=random, seed=seed, steps=steps, build=build, **options,
        )  # fmt: skip
    if schedule != "1f1b":
        raise RequestError(f"'schedule' must come with 'pipeline', got {schedule!r} alone; add e.g. pipeline=2")
    given = _Given(model=model, args=tuple(args), kwargs=dict(kwargs or {}))
    grid, inner = _grid(mesh, plan), None
    if plan is not None:
        inner = _inner_loss(plan, given, loss, options.get("rules", ()))
    outer = loss or default_loss
    run = {"steps": steps, "seed": seed, "accumulate": accumulate}
    wide, reference = _reference(given, outer, run)
    # A plan that is given or has to fit is one for the model as it is.
    planned = given if plan is not None or options.get("memory_limit_bytes") is not None else wide
    worst: CheckReport | None = None
    for found in _plans(planned, plan, random, seed, {"cluster": usual_cluster(grid), **options, "mesh": grid}):
        ran, captured = wide, wide.captured(found, inner)
        if planned is not wide and not has_entries(found, captured):
            # The model asks for float32 itself: in float64 that is another program.
            ran, captured = planned, planned.captured(found, inner)
            reference = train(planned.model, planned.args, planned.kwargs, outer, **run)
        if build is not None:
            inside = inner is not None
            record = train_on_gloo(build, found, wide=ran is not given, inside=inside, **run)
            tolerance = tolerance_of(captured)
            report = compare(reference, record, captured, tolerance, grid.size, backend="gloo", loss_inside=inside)
        else:
            report = check_plan(
                ran.model,
                ran.args,
                ran.kwargs,
                captured,
                found,
                loss=outer,
                loss_inside=inner is not None,
                reference=reference,
                **run,
            )
        if worst is None or (not report.equal, report.max_error) > (not worst.equal, worst.max_error):
            worst = report
    assert worst is not None
    return worst


@dataclass(slots=True, kw_only=True, eq=False)
class _Given:
    """A model and its inputs, and its captures by how they recompute."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    captures: dict[Recompute, Captured] = field(default_factory=dict)

    def keep(self, prepared: Draft) -> None:
        """Remember a draft's capture, if it is whole: `cut` ones hold some blocks only."""
        if not prepared.blocks.cut:
            self.captures[prepared.options.recompute] = prepared.captured

    def captured(self, plan: Plan, loss: LossFunction | None) -> Captured:
        """The capture that `plan` runs."""
        mode = plan.options.recompute
        if mode not in self.captures:
            self.captures[mode] = capture_by(plan, self.model, self.args, self.kwargs, loss)
        return self.captures[mode]


def _grid(mesh: Mesh | str | None, plan: Plan | None) -> Mesh:
    grid = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    if plan is None:
        if grid is None:
            raise RequestError("'mesh' must be given where there is no plan, got neither; e.g. mesh='2x2'")
        return grid
    if grid is not None and grid.shape != plan.mesh.shape:
        raise ReplayError(f"'plan' must be for mesh {grid}, got one for mesh {plan.mesh}; plan again for this mesh")
    return plan.mesh


def _inner_loss(
    plan: Plan, given: _Given, loss: LossFunction | None, rules: Sequence[OpRule] = ()
) -> LossFunction | None:
    """The loss if it is part of `plan`, once it is sure that the plan is for the model."""
    call = (given.model, given.args, given.kwargs)
    without = capture_for(plan, *call, None, rules)
    if loss is None or has_entries(plan, without):
        return None
    capture_for(plan, *call, loss, rules)
    return loss


def has_entries(plan: Plan, captured: Captured) -> bool:
    """Whether `plan` knows every op of `captured`."""
    lookup = PlanLookup(plan)
    try:
        for node in captured.ops():
            if op_name(node) != "getitem":
                lookup(captured.names[node])
    except ReplayError:
        return False
    return True


def usual_cluster(mesh: Mesh) -> Cluster:
    """H100s, eight to a node where that fits, for a mesh that only counts devices."""
    size = mesh.size
    per_node = 8 if size % 8 == 0 else size
    return Cluster(device="h100-sxm", nodes=size // per_node, devices_per_node=per_node)


def _reference(given: _Given, loss: LossFunction, run: dict[str, int]) -> tuple[_Given, Record]:
    """The model in the widest precision it runs in, and what one process computes with it."""
    model, args, kwargs = in_float64(given.model, given.args, given.kwargs)
    with contextlib.suppress(RuntimeError, TypeError):
        return _Given(model=model, args=args, kwargs=kwargs), train(model, args, kwargs, loss, **run)
    # Some kernels have no float64: the model is checked as it is.
    try:
        return given, train(given.model, given.args, given.kwargs, loss, **run)
    except MeshwrightError:
        raise
    except Exception as error:
        capture(given.model, given.args, given.kwargs)  # names what in the model is refused, where that is the reason
        raise RequestError(
            f"'model' must train in one process to be checked, got {type(error).__name__}: {error}"
        ) from error


def _plans(given: _Given, plan: Plan | None, count: int, seed: int, options: dict[str, Any]) -> Iterator[Plan]:
    if plan is not None:
        yield plan
        return
    call = (given.model, given.args, given.kwargs)
    if not count:
        prepared, solution = plan_draft(*call, **options)
        given.keep(prepared)
        yield prepared.sketch(solution) if _roomy(prepared, solution) else prepared.write(solution)
        return
    settings = {k: v for k, v in options.items() if k not in ("time_limit_s", "gap", "solver")}
    recompute = ("none", "pointwise", "block")
    traces = Traces(*call, options.get("loss"))
    for index in range(count):
        prepared = draft(*call, traces=traces, **{**settings, "recompute": recompute[(seed + index) % 3]})
        given.keep(prepared)
        yield random_plan(prepared, seed + index, to_run=True)


def random_plan(prepared: Draft, seed: int, *, to_run: bool = False) -> Plan:
    """A random plan among those that fit the memory limit. One that is only made `to_run` keeps the estimate of its
    memory where that is far from the limit."""
    room = float(prepared.limit)
    for _ in range(_COUNTS):
        solution = _sampled(prepared, seed, room)
        if to_run and _roomy(prepared, solution):
            return prepared.sketch(solution)
        plan = prepared.write(solution)
        used = plan.predicted.memory.peak_bytes
        if used <= prepared.limit:
            return plan
        room *= 0.97 * prepared.limit / used
    raise Infeasible(
        f"'memory_limit_bytes' must leave a random plan, got {prepared.limit} bytes per device, "
        f"{used - prepared.limit} less than the last one takes; use a higher limit"
    )


def _roomy(prepared: Draft, solution: Solution) -> bool:
    """Whether memory, as estimated, is so far from the limit that it needs no count."""
    return needs_no_count(float(prepared.timeline.profile(solution.choices).max()), prepared.limit)


def _sampled(prepared: Draft, seed: int, room: float) -> Solution:
    """A random solution whose estimated memory stays within `room` bytes."""
    problem, timeline = prepared.formulation.problem, prepared.timeline
    moments: list[int] = []
    while True:
        rows = tuple(timeline.row(moment, room) for moment in moments)
        choices = sample(replace(problem, rows=rows), randomness.Random(seed))
        profile = timeline.profile(choices)
        peak = int(profile.argmax())
        if profile[peak] <= room or peak in moments:
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
    return Solution(choices=choices, objective_s=value, bound_s=0.0, gap=1.0, status="random", seconds=0.0, stats=stats)

"""The call behind `meshwright check --pipeline`: a plan with a pipeline on simulated or real ranks, against one process
on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from ...passes.capture import capture
from ...passes.graph import Captured
from ...passes.microbatches import microbatch, smaller_microbatch
from ...passes.recompute import Recompute
from ...plans.errors import RequestError
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ..api import draft
from ..apply import capture_for
from ..fitting import solve_within
from ..stages.named_pipelines import named_pipeline
from ..zoo import named_schedule
from .check import CheckReport, compare, default_loss, in_float64, tolerance_of, train
from .check_pipeline import simulate_pipeline
from .gloo import Build, train_pipeline_on_gloo
from .verify import has_entries, random_plan, usual_cluster

__all__ = ["check_pipeline"]

LossFunction = Callable[[Any], torch.Tensor]
_RECOMPUTE: tuple[Recompute, ...] = ("none", "pointwise", "block")


def check_pipeline(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    mesh: Mesh | None,
    plan: Plan | None = None,
    pipeline: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    loss: LossFunction | None = None,
    random: int = 0,
    seed: int = 0,
    steps: int = 3,
    build: Build | None = None,
    **options: Any,
) -> CheckReport:
    """As `planner.verify.check`, for a plan with a pipeline: `plan`, or one of `pipeline` ranks that each have `mesh`,
    whose stages have equally many blocks and are run by the schedule called `schedule`.

    The loss, `loss` or the model's own or a mean square, is part of the program.
    """
    if plan is not None and plan.pipeline is None:
        raise RequestError("'plan' must have a pipeline to be checked with one, got one without; leave out --pipeline")
    inner, given, run = loss or default_loss, (model, args, kwargs), {"steps": steps, "seed": seed}
    wide, reference = in_float64(*given), None
    try:
        reference = train(*wide, inner, **run)
    except RuntimeError:
        # Some kernels have no float64: the model is checked as it is.
        wide = given
    worst: CheckReport | None = None
    if plan is not None:
        plans = iter([(plan, _captured(plan, given, wide, inner, options.get("rules", ())))])
    else:
        wanted = _Wanted(mesh or Mesh.of((1,)), pipeline or 1, microbatches or 1, schedule, random, seed)
        plans = _plans(wide, wanted, inner, options)
    for found, captured in plans:
        assert found.pipeline is not None
        ran = wide
        if plan is not None and not has_entries(found, captured):
            # The model asks for float32 itself: in float64 that is another program.
            ran, reference = given, None
            captured = _captured(found, given, given, inner, options.get("rules", ()))
        reference = reference or train(*ran, inner, **run)
        if build is not None:
            record = train_pipeline_on_gloo(build, found, wide=ran is not given, **run)
        else:
            few = smaller_microbatch(ran[1], ran[2], found.pipeline.microbatches)
            again, mode = captured.again, found.options.recompute
            smaller = few and capture(ran[0], *few, loss=inner, recompute=mode, again=again)
            record = simulate_pipeline(*ran, captured, found, smaller=smaller, **run)
        report = compare(
            reference,
            record,
            captured,
            tolerance_of(captured),
            found.processes(found.pipeline.ranks - 1).stop,
            backend="simulated" if build is None else "gloo",
            loss_inside=True,
        )
        if worst is None or (not report.equal, report.max_error) > (not worst.equal, worst.max_error):
            worst = report
    assert worst is not None
    return worst


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The mesh of a stage, the pipeline, and how many random plans (0: the planner's own)."""

    mesh: Mesh
    ranks: int
    microbatches: int
    schedule: str
    random: int
    seed: int


def _captured(plan: Plan, given: tuple, ran: tuple, loss: LossFunction, rules: Any) -> Captured:
    """The micro-batch of `ran` that `plan` runs, once it is sure that the plan is for the model `given`."""
    assert plan.pipeline is not None
    count = plan.pipeline.microbatches
    captured = capture_for(plan, given[0], *microbatch(given[1], given[2], count), loss, rules)
    if ran is given:
        return captured
    one = microbatch(ran[1], ran[2], count)
    return capture(ran[0], *one, loss=loss, recompute=plan.options.recompute, again=captured.again)


def _plans(
    wide: tuple, wanted: _Wanted, loss: LossFunction, options: dict[str, Any]
) -> Iterator[tuple[Plan, Captured]]:
    """The planner's choice for a stage's mesh, or random ones, each with the pipeline asked for."""
    named_schedule(wanted.schedule, wanted.ranks, wanted.microbatches)  # refused before anything is captured
    model, args, kwargs = wide
    one = microbatch(args, kwargs, wanted.microbatches)
    whole = usual_cluster(Mesh.of((wanted.ranks * wanted.mesh.size,)))
    solving = {key: options[key] for key in ("time_limit_s", "gap", "solver") if key in options}
    settings = {"mesh": wanted.mesh, "cluster": usual_cluster(wanted.mesh), "loss": loss, "whole": True}
    settings |= {key: value for key, value in options.items() if key not in solving}
    for index in range(max(1, wanted.random)):
        mode: Recompute = _RECOMPUTE[(wanted.seed + index) % 3] if wanted.random else "pointwise"
        prepared = draft(model, *one, recompute=mode, **settings)
        pipeline = named_pipeline(prepared.captured, wanted.ranks, wanted.microbatches, wanted.schedule)
        if wanted.random:
            plan = random_plan(prepared, wanted.seed + index)
        else:
            plan = prepared.write(solve_within(prepared, **solving))
        yield msgspec.structs.replace(plan, pipeline=pipeline, cluster=whole), prepared.captured

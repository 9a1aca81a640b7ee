"""The planner's calls: plan a model, apply a plan, check one, or all in one."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn

from ..cost_models.calibration import Calibration
from ..cost_models.prices import Prices
from ..passes.blocks import with_fewer_blocks
from ..passes.capture import capture
from ..passes.graph import Captured
from ..passes.recompute import RECOMPUTE, Recompute
from ..plans.clusters import Cluster
from ..plans.errors import Infeasible, RequestError
from ..plans.meshes import Mesh
from ..plans.plan import Model, Options, Plan
from ..plans.recipes import Recipe
from .arguments import check_arguments, check_replicated
from .checking.check import default_loss
from .dynamic import attach, dynamic_dims
from .fitting import refuse_hopeless, solve_within
from .interrupts import interrupts_wait
from .sharding.accumulation import Accumulation
from .sharding.capturing import Traces, captured_by_blocks
from .sharding.constraints import Constraint, Constraints
from .sharding.decisions import Formulation
from .sharding.floor import least_bytes
from .sharding.folding import Blocks
from .sharding.formulate import formulate
from .sharding.memory import Count, counted
from .sharding.optimizers import Optimizer
from .sharding.own_rules import OpRule, attach_rules
from .sharding.recipes import recipe_constraints
from .sharding.timeline import Timeline
from .sharding.write import model_of, write_plan
from .solver.problem import Solution, Stats, evaluate
from .solver.search import Progress

__all__ = ["Draft", "draft", "plan", "plan_draft", "usual_mesh"]

LossFunction = Callable[[Any], torch.Tensor]


class Draft:
    """Everything before solving: the captured model and its problem on one mesh. Also what checks sample plans from."""

    def __init__(
        self,
        captured: Captured,
        blocks: Blocks,
        formulation: Formulation,
        timeline: Timeline,
        options: Options,
        cluster: Cluster,
        name: str,
    ) -> None:
        self.captured, self.blocks, self.formulation, self.timeline = captured, blocks, formulation, timeline
        self.options, self.cluster, self.name = options, cluster, name
        # A plan is written when its memory is counted and again when it is given out.
        self._counted: tuple[Sequence[int], Count] | None = None

    @property
    def limit(self) -> int:
        """Bytes that a device may fill."""
        given = self.options.memory_limit_bytes
        return self.formulation.prices.capacity_bytes if given is None else given

    def model(self) -> Model:
        """What a plan remembers of the model."""
        return model_of(self.captured, self.name, self.blocks)

    def write(self, solution: Solution) -> Plan:
        """The plan of a solution, its memory counted."""
        plan = self.sketch(solution)
        if self._counted is None or self._counted[0] != solution.choices:
            self._counted = (solution.choices, counted(self.captured, plan, self.blocks, self.limit))
        memory = msgspec.structs.replace(self._counted[1].memory, limit_bytes=self.limit)
        return msgspec.structs.replace(plan, predicted=msgspec.structs.replace(plan.predicted, memory=memory))

    def sketch(self, solution: Solution) -> Plan:
        """The plan of a solution, its memory as estimated: a plan that is run to be checked, not to be given out."""
        return write_plan(
            self.formulation,
            self.timeline,
            solution,
            model=self.model(),
            cluster=self.cluster,
            options=self.options,
            limit=self.limit,
        )

    def solve(self, *, time_limit_s: float, gap: float, warm: Sequence[int] | None = None) -> Solution:
        """The best solution within memory, see `solve_within`."""
        return solve_within(self, time_limit_s=time_limit_s, gap=gap, warm=warm)

    def seconds(self, choices: Sequence[int]) -> float:
        """What a solution's `objective_s` is for these choices."""
        return evaluate(self.formulation.problem, choices)

    def given(self, choices: Sequence[int]) -> Solution:
        """Choices that nobody searched for, as a solution without a bound."""
        seconds = evaluate(self.formulation.problem, choices)
        return Solution(
            choices=tuple(choices), objective_s=seconds, bound_s=0.0, gap=1.0, status="replayed", seconds=0.0,
            stats=Stats(),
        )  # fmt: skip

    def changed(self, formulation: Formulation, options: Options) -> Draft:
        """The same with another problem or other options."""
        made = copy.copy(self)
        made.formulation, made.options, made._counted = formulation, options, None
        return made

    def missed(self, solution: Solution) -> np.ndarray:
        """Bytes by which the estimate of a solution that was written is too low, at each moment of the timeline."""
        assert self._counted is not None and self._counted[0] == solution.choices
        estimate, count = self.timeline.profile(solution.choices), self._counted[1].profile
        names = [*(self.captured.names[node] for node in self.timeline.order), ""]
        seen = np.array([count.get(name, size) for name, size in zip(names, estimate.tolist(), strict=True)])
        return np.where(self.timeline.valid, seen - estimate, 0.0)


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    mesh: Mesh | str | Sequence[Mesh | str] | None = None,
    loss: LossFunction | None = None,
    constraints: Sequence[str | Constraint] = (),
    recipe: str | None = None,
    optimizer: str = "adamw",
    compiled: bool = True,
    recompute: Recompute | Literal["auto"] = "auto",
    memory_limit_bytes: int | None = None,
    replicate: Sequence[str] = (),
    dynamic: object = None,
    rules: Sequence[OpRule] = (),
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    solver: str = "highs",
    name: str | None = None,
    on_progress: Progress | None = None,
    warm: Plan | None = None,
    cache: str | os.PathLike[str] | None = None,
    pipeline: int | Literal["auto"] | None = None,
    microbatches: int | Literal["auto"] | None = None,
    schedule: str = "auto",
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> Plan:
    """The fastest plan found for one training step of `model` on `cluster`, with the proven gap to the best one.

    model, args, kwargs   as the model is called, on the whole (global) batch; tensors may be on the meta device
    mesh                  shape and axis names, e.g. "8x8"; by default nodes by devices per node. With a pipeline that
                          of one rank, or one for each, e.g. "4/2x2" or ["4", "2x2"]
    loss                  maps the model's output to a scalar and becomes part of the plan
    constraints           e.g. "layers.*.wq.weight = S(0),R" (see `Constraint`)
    recipe                a named way of splitting, e.g. "fsdp+tp" (see plans/recipes.py); what it leaves open is solved
    optimizer             adamw, adam, sgd, sgd-momentum or none: its state and update are priced
    recompute             none, pointwise or block (see docs/how-it-chooses.md); auto: pointwise, or block where memory
                          is short and that is faster
    memory_limit_bytes    per device, over the peak of the step; by default the device's memory
    replicate             ops that are to run whole on every device, as those without a sharding rule do
    dynamic               dims of inputs whose size may change, as for torch.export: {"x": {0: Dim("batch", max=64)}}
    rules                 how ops of your own split and what they cost (see `OpRule` and docs/custom-ops.md)
    gap, time_limit_s     when the solver may stop: the relative distance to the bound, seconds
    warm                  a plan to start the search from, e.g. one for the same model under another limit
    cache                 a folder of solved plans: the same problem is not solved twice (see planner/cache.py)
    calibration           what `meshwright calibrate` measured on the cluster's device, or the file of it
    pipeline              how many pipeline ranks, or auto; `mesh` is then that of one rank
    microbatches          parts along dim 0 that the batch is run in, as even as can be, or auto, as with a pipeline
    schedule              auto, or a published one: 1f1b, interleaved:2, zb-h1, ... (see docs/how-to-run-a-pipeline.md)

    Raises RequestError (a CaptureError when the model cannot be captured as it is) or Infeasible.
    """
    request: dict[str, Any] = dict(
        cluster=cluster, mesh=mesh, loss=loss, constraints=constraints, recipe=recipe, optimizer=optimizer,
        compiled=compiled, recompute=recompute, memory_limit_bytes=memory_limit_bytes, replicate=replicate, name=name,
        calibration=calibration, dynamic=dynamic, rules=rules, time_limit_s=time_limit_s, gap=gap, solver=solver,
        on_progress=on_progress,
    )  # fmt: skip
    check_arguments(
        model=model, args=args, kwargs=kwargs, warm=warm, cache=cache, pipeline=pipeline, microbatches=microbatches,
        schedule=schedule, **request,
    )  # fmt: skip
    each = mesh is not None and not isinstance(mesh, Mesh) and (not isinstance(mesh, str) or "/" in mesh)
    if pipeline is not None or microbatches is not None or each:
        from .stages.degrees import choose_degrees

        if warm is not None or cache is not None:
            raise RequestError("'warm' and 'cache' must be left out with 'pipeline' or 'microbatches', got one of them")
        # The backward of a pipeline begins in its last stage: the loss is part of the program.
        request["loss"] = loss or default_loss
        ranks = pipeline or ("auto" if each else 1)
        degrees = {"pipeline": ranks, "microbatches": microbatches or "auto"}
        found = choose_degrees(model, args, kwargs or {}, schedule=schedule, **degrees, **request)
        if ranks != "auto" or found.pipeline is None or found.pipeline.ranks * found.pipeline.microbatches > 1:
            return found
        # One rank that runs the batch whole is no pipeline: the plan without one has its own, nearer bound.
        request["mesh"] = found.mesh
    elif schedule != "auto":
        raise RequestError(f"'schedule' must come with 'pipeline' or 'microbatches', got {schedule!r} alone; add one")
    prepared, solution = plan_draft(model, args, kwargs, warm=warm, cache=cache, **request)
    return prepared.write(solution)


def plan_draft(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    recompute: Recompute | Literal["auto"] = "auto",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    solver: str = "highs",
    on_progress: Progress | None = None,
    warm: Plan | None = None,
    cache: str | os.PathLike[str] | None = None,
    traces: Traces | None = None,
    **request: Any,
) -> tuple[Draft, Solution]:
    """What `plan` writes, before it is written; arguments as for `plan`, and `traces` of the same call."""
    from .cache import Cache, choices_from

    if solver not in ("highs", "cbc"):
        raise RequestError(f"'solver' must be highs or cbc, got {solver!r}")
    store = None if cache is None else Cache(cache)
    modes: Sequence[Recompute] = ("pointwise", "block") if recompute == "auto" else (recompute,)
    traces = traces or Traces(model, args, kwargs or {}, request.get("loss"))
    best: tuple[Draft, Solution] | None = None
    searched = 0.0
    for index, mode in enumerate(modes):
        last = mode == modes[-1]
        try:
            prepared = draft(
                model, args, kwargs, recompute=mode, on_progress=on_progress, traces=traces, hopeless=last, **request
            )
        except Infeasible:
            if last and best is None:
                raise
            continue
        key = "" if store is None else store.key(prepared, gap=gap, solver=solver)
        solution = None if store is None else store.find(key, prepared)
        if solution is None:
            start = None if warm is None else choices_from(warm, prepared)
            # The limit is for all modes: what one leaves is for the next.
            left = max(1.0, (time_limit_s - searched) / (len(modes) - index))
            began = time.perf_counter()
            try:
                solution = solve_within(
                    prepared, time_limit_s=left, gap=gap, solver=solver, on_progress=on_progress, warm=start
                )
            except Infeasible:
                if last and best is None:
                    raise
                continue
            finally:
                searched += time.perf_counter() - began
            if store is not None:
                store.keep(key, solution)
        if best is None or solution.objective_s < best[1].objective_s:
            best = prepared, solution
        # Where memory costs this mode nothing, one that recomputes more is no faster.
        if solution.status == "interrupted" or solution.objective_s <= (1.0 + gap) * (solution.free_s or 0.0):
            break
    assert best is not None
    return best


def draft(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    mesh: Mesh | str | None = None,
    loss: LossFunction | None = None,
    constraints: Sequence[str | Constraint] = (),
    recipe: str | None = None,
    optimizer: str = "adamw",
    compiled: bool = True,
    recompute: Recompute = "pointwise",
    memory_limit_bytes: int | None = None,
    replicate: Sequence[str] = (),
    dynamic: object = None,
    rules: Sequence[OpRule] = (),
    name: str | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    on_progress: Progress | None = None,
    whole: bool = False,
    held: bool = True,
    accumulation: Accumulation | None = None,
    stage_of: int = 1,
    known: tuple[Captured, Blocks] | None = None,
    traces: Traces | None = None,
    hopeless: bool = True,
) -> Draft:
    """Capture `model` and set up its problem; arguments as for `plan`. `whole` captures every block of a deep model,
    `held` False leaves the layouts that constraints rule out in the problem (see `Scenario`); of several micro-batches
    (`accumulation`) the inputs are one; `mesh` is that of one rank of a pipeline of `stage_of`; `known` is the same
    model, loss, inputs and recomputation captured before, `traces` are those of the same call. Where `hopeless` is
    False, Infeasible is raised before anything is priced if no plan comes near the memory of the device."""
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    grid = usual_mesh(where) if mesh is None else Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    updates = Optimizer.of(optimizer)
    if recompute not in RECOMPUTE:
        raise RequestError(f"'recompute' must be one of auto, {', '.join(RECOMPUTE)}, got {recompute!r}")
    limits = Constraints.of(constraints, grid.ndim, held=held)
    named = None if recipe is None else Recipe.parse(recipe, grid)
    measured = Calibration.load(calibration) if isinstance(calibration, str | os.PathLike) else calibration
    prices = Prices.of(where, grid, compiled=compiled, stage_of=stage_of, calibration=measured)
    if on_progress is not None:
        on_progress("capture", 0.0, 0.0)
    dims = dynamic_dims(model, args, kwargs or {}, dynamic)
    if known is None:
        with interrupts_wait():
            traces = traces or Traces(model, args, kwargs or {}, loss)
            captured, blocks = captured_by_blocks(traces, limits, recompute, whole=whole)
            attach_rules(captured, rules)
            if not hopeless:
                room = prices.capacity_bytes if memory_limit_bytes is None else memory_limit_bytes
                least = least_bytes(captured, blocks, updates, grid.size)
                refuse_hopeless(least, "the start of the backward", room, grid)
            for call in dims.calls:
                few = with_fewer_blocks(model, blocks.cut)
                other = capture(few, *call, loss=loss, recompute=recompute, again=captured.again)
                attach_rules(other, rules)
                attach(captured, other)
    else:
        captured, blocks = known
    check_replicated(replicate, captured)
    if on_progress is not None:
        on_progress("price", 0.0, 0.0)
    if named is not None:
        limits.recipe = str(named)
        limits.exact = recipe_constraints(named, captured, replicate=replicate)
        if named.axes("zero1"):
            accumulation = replace(accumulation or Accumulation(), late=True)
    for node, source in captured.sources.items():
        limits.widen(captured.names[node], source.shape, grid.shape)
    formulation = formulate(
        captured,
        grid,
        prices,
        blocks=blocks,
        compiled=compiled,
        optimizer_s=lambda size: prices.update_s(optimizer, updates.passes, size),
        constraints=limits,
        replicate=replicate,
        accumulation=accumulation,
    )
    limits.check_used()
    options = Options(
        optimizer=optimizer,
        compiled=compiled,
        recompute=recompute,
        prefetch=True,
        memory_limit_bytes=memory_limit_bytes,
        constraints=tuple(str(c) for c in limits.items),
        recipe=limits.recipe,
        seed=None,
        replicate=tuple(replicate),
        dynamic=dims.dims,
    )
    timeline = Timeline(formulation, optimizer=updates, device=where.device)
    return Draft(captured, blocks, formulation, timeline, options, where, name or type(model).__name__)


def usual_mesh(cluster: Cluster) -> Mesh:
    """Nodes by devices per node, or one axis within a node."""
    if cluster.nodes == 1 or cluster.devices_per_node == 1:
        return Mesh.of((cluster.size,))
    return Mesh.of((cluster.nodes, cluster.devices_per_node))

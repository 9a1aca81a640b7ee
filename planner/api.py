"""The planner's calls: plan a model, apply a plan, check one, or all in one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from .accumulation import Accumulation
from .capturing import captured_by_blocks
from .check import default_loss
from .constraints import Constraint, Constraints
from .dynamic import attach, dynamic_dims
from .folding import Blocks
from .formulate import Formulation, formulate
from .interrupts import interrupts_wait
from .memory import Count, counted
from .optimizers import Optimizer
from .own_rules import OpRule, attach_rules
from .problem import Solution, evaluate
from .recipes import recipe_constraints
from .solver import Progress, solve
from .timeline import Timeline
from .write import model_of, write_plan

__all__ = ["Draft", "draft", "plan", "plan_draft", "solve_within", "usual_mesh", "within_rooms"]

LossFunction = Callable[[Any], torch.Tensor]

# How many solutions are counted before the request is given up.
_COUNTS = 10
# Plans met that are counted when none of the solutions fits.
_COUNTED = 24


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
        plan = write_plan(
            self.formulation,
            self.timeline,
            solution,
            model=self.model(),
            cluster=self.cluster,
            options=self.options,
            limit=self.limit,
        )
        if self._counted is None or self._counted[0] != solution.choices:
            self._counted = (solution.choices, counted(self.captured, plan, self.blocks, self.limit))
        memory = msgspec.structs.replace(self._counted[1].memory, limit_bytes=self.limit)
        return msgspec.structs.replace(plan, predicted=msgspec.structs.replace(plan.predicted, memory=memory))

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
    mesh: Mesh | str | None = None,
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
    mesh                  shape and axis names, e.g. "8x8"; by default nodes by devices per node
    loss                  maps the model's output to a scalar and becomes part of the plan
    constraints           e.g. "layers.*.wq.weight = S(0),R" (see `Constraint`)
    recipe                a named way of splitting, e.g. "fsdp+tp" (see plans/recipes.py); what it leaves open is solved
    optimizer             adamw, adam, sgd, sgd-momentum or none: its state and update are priced
    recompute             none, pointwise or block (see docs/how-it-chooses.md); auto: pointwise, and block if that
    does not fit memory_limit_bytes    per device, over the peak of the step; by default the device's memory
    replicate             ops without a sharding rule that may run whole on every device
    dynamic               dims of inputs whose size may change, as for torch.export: {"x": {0: Dim("batch", max=64)}}
    rules                 how ops of your own split and what they cost (see `OpRule` and docs/custom-ops.md)
    gap, time_limit_s     when the solver may stop: the relative distance to the bound, seconds
    warm                  a plan to start the search from, e.g. one for the same model under another limit
    cache                 a folder of solved plans: the same problem is not solved twice (see planner/cache.py)
    calibration           what `meshwright calibrate` measured on the cluster's device, or the file of it
    pipeline              how many pipeline ranks, or auto; `mesh` is then that of one rank
    microbatches          equal parts along dim 0 that the batch is run in, or auto, as with a pipeline
    schedule              auto, or a published one: 1f1b, interleaved:2, zb-h1, ... (see docs/how-to-run-a-pipeline.md)

    Raises RequestError (a CaptureError when the model cannot be captured as it is) or Infeasible.
    """
    request: dict[str, Any] = dict(
        cluster=cluster, mesh=mesh, loss=loss, constraints=constraints, recipe=recipe, optimizer=optimizer,
        compiled=compiled, recompute=recompute, memory_limit_bytes=memory_limit_bytes, replicate=replicate, name=name,
        calibration=calibration, dynamic=dynamic, rules=rules, time_limit_s=time_limit_s, gap=gap, solver=solver,
        on_progress=on_progress,
    )  # fmt: skip
    if pipeline is not None or microbatches is not None:
        from .degrees import choose_degrees

        if warm is not None or cache is not None:
            raise RequestError("'warm' and 'cache' must be left out with 'pipeline' or 'microbatches', got one of them")
        # The backward of a pipeline begins in its last stage: the loss is part of the program.
        request["loss"] = loss or default_loss
        degrees = {"pipeline": 1 if pipeline is None else pipeline, "microbatches": microbatches or "auto"}
        return choose_degrees(model, args, kwargs or {}, schedule=schedule, **degrees, **request)
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
    **request: Any,
) -> tuple[Draft, Solution]:
    """What `plan` writes, before it is written; arguments as for `plan`."""
    from .cache import Cache, choices_from

    if solver not in ("highs", "cbc"):
        raise RequestError(f"'solver' must be highs or cbc, got {solver!r}")
    store = None if cache is None else Cache(cache)
    modes: Sequence[Recompute] = ("pointwise", "block") if recompute == "auto" else (recompute,)
    for mode in modes:
        prepared = draft(model, args, kwargs, recompute=mode, on_progress=on_progress, **request)
        key = "" if store is None else store.key(prepared, gap=gap, solver=solver)
        known = None if store is None else store.find(key, prepared)
        if known is not None:
            return prepared, known
        start = None if warm is None else choices_from(warm, prepared)
        try:
            solution = solve_within(
                prepared, time_limit_s=time_limit_s, gap=gap, solver=solver, on_progress=on_progress, warm=start
            )
            if store is not None:
                store.keep(key, solution)
            return prepared, solution
        except Infeasible:
            if mode == modes[-1]:
                raise
    raise AssertionError("no recompute mode")


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
) -> Draft:
    """Capture `model` and set up its problem; arguments as for `plan`. `whole` captures every block of a deep model,
    `held` False leaves the layouts that constraints rule out in the problem (see `Scenario`); of several micro-batches
    (`accumulation`) the inputs are one; `mesh` is that of one rank of a pipeline of `stage_of`; `known` is the same
    model, loss, inputs and recomputation captured before."""
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    grid = usual_mesh(where) if mesh is None else Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    updates = Optimizer.of(optimizer)
    if recompute not in RECOMPUTE:
        raise RequestError(f"'recompute' must be one of auto, {', '.join(RECOMPUTE)}, got {recompute!r}")
    if memory_limit_bytes is not None and memory_limit_bytes <= 0:
        raise RequestError(f"'memory_limit_bytes' must be positive, got {memory_limit_bytes}")
    limits = Constraints.of(constraints, grid.ndim, held=held)
    named = None if recipe is None else Recipe.parse(recipe, grid)
    measured = Calibration.load(calibration) if isinstance(calibration, str | os.PathLike) else calibration
    prices = Prices.of(where, grid, compiled=compiled, stage_of=stage_of, calibration=measured)
    if on_progress is not None:
        on_progress("capture", 0.0, 0.0)
    dims = dynamic_dims(model, args, kwargs or {}, dynamic)
    if known is None:
        with interrupts_wait():
            captured, blocks = captured_by_blocks(model, args, kwargs or {}, loss, limits, recompute, whole=whole)
            attach_rules(captured, rules)
            for call in dims.calls:
                few = with_fewer_blocks(model, blocks.cut)
                other = capture(few, *call, loss=loss, recompute=recompute, again=captured.again)
                attach_rules(other, rules)
                attach(captured, other)
    else:
        captured, blocks = known
    if on_progress is not None:
        on_progress("price", 0.0, 0.0)
    if named is not None:
        limits.recipe = str(named)
        limits.exact = recipe_constraints(named, captured, replicate=replicate)
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


def solve_within(
    prepared: Draft,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    solver: str = "highs",
    on_progress: Progress | None = None,
    warm: Sequence[int] | None = None,
) -> Solution:
    """The best solution whose memory stays within the limit at every moment of the step, as counted.

    What the problem limits is an estimate (planner/timeline.py). A solution that does not fit by the count tells how
    far the estimate is off at each moment: by so much the limit on the estimate is moved there, and the problem is
    solved again; where that leaves no plan, by a share of it that is halved in on; at last the plans met on the way are
    counted. (An estimate below half of the limit needs no count.) `warm`
    is a plan to start from. Raises Infeasible when none of the solutions fits.
    """
    began, limit, timeline = time.perf_counter(), float(prepared.limit), prepared.timeline
    known = Known(plans=() if warm is None else (tuple(warm),))
    missed, rooms = np.zeros(timeline.end + 1), np.full(timeline.end + 1, math.inf)
    failed: Infeasible | None = None
    # The share of what was missed that is taken off the limit: too little at `low`, too much at `high`.
    share, low, high = 1.0, 0.0, math.inf
    first: Solution | None = None
    met: dict[tuple[int, ...], None] = {}
    for _ in range(_COUNTS):
        left = max(1.0, time_limit_s - (time.perf_counter() - began))
        try:
            solution, known = within_rooms(
                prepared, rooms, left, known, gap=gap, solver=solver, on_progress=on_progress
            )
        except Infeasible as error:
            failed = error
            if not (missed > 0.002 * limit).any():
                break
            high = share
        else:
            estimate = float(timeline.profile(solution.choices).max())
            used = prepared.write(solution).predicted.memory.peak_bytes if 2 * estimate > limit else 0
            if used <= limit:
                return replace(solution, seconds=time.perf_counter() - began)
            if solution.status == "interrupted":
                raise KeyboardInterrupt
            # Two plans that are over at different moments must not take turns.
            first = first or solution
            met.update(dict.fromkeys((solution.choices, *solution.others)))
            seen = prepared.missed(solution)
            failed, missed = None, np.maximum(missed, seen) if math.isfinite(rooms[-1]) else seen
            low = share if math.isfinite(high) else 0.0
        share = (low + high) / 2 if math.isfinite(high) else 1.0
        rooms = limit - share * missed
    if first is not None and (fitting := _fitting(prepared, first, met)) is not None:
        return replace(fitting, seconds=time.perf_counter() - began)
    if failed is None:
        failed = Infeasible(f"the plan found last takes {used - prepared.limit} bytes too much, as counted")
    raise _infeasible(failed, prepared) from failed


def _fitting(prepared: Draft, first: Solution, met: Iterable[tuple[int, ...]]) -> Solution | None:
    """The fastest of the plans met that fits by the count; its gap is to the bound of `first`, which had no limit."""
    problem, limit = prepared.formulation.problem, prepared.limit
    seconds = {plan: evaluate(problem, plan) for plan in met}
    for plan in sorted(seconds, key=seconds.__getitem__)[:_COUNTED]:
        value = seconds[plan]
        gap = max(0.0, value - first.bound_s) / value
        found = replace(first, choices=plan, objective_s=value, gap=gap, status="feasible", others=())
        if prepared.write(found).predicted.memory.peak_bytes <= limit:
            return found
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """What one search hands to the next: moments that are worth a limit, prices of these limits, and plans."""

    moments: tuple[int, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    plans: Sequence[Sequence[int]] = ()


def within_rooms(
    prepared: Draft,
    rooms: np.ndarray,
    time_limit_s: float,
    known: Known | None = None,
    *,
    gap: float = 1e-3,
    solver: str = "highs",
    on_progress: Progress | None = None,
) -> tuple[Solution, Known]:
    """The best solution whose estimated memory stays within `rooms` bytes, one figure per moment of the timeline, and
    what it leaves to the next search.

    Rows of the moments that a solution would overfill are added until none is: the last solution is optimal among those
    that fit, because it is optimal for a part of the limits and meets them all.
    """
    timeline, began, bound = prepared.timeline, time.perf_counter(), -math.inf
    known = known or Known()
    moments = tuple(moment for moment in known.moments if math.isfinite(rooms[moment]))
    while True:
        left = max(1.0, time_limit_s - (time.perf_counter() - began))
        rows = tuple(timeline.row(moment, float(rooms[moment])) for moment in moments)
        # Before any limit is known to bind, most of the time is kept for the search that meets them.
        solution = solve(
            replace(prepared.formulation.problem, rows=rows),
            time_limit_s=left if moments else 0.4 * left,
            gap=gap,
            solver=solver,
            on_progress=on_progress,
            warm=known.plans,
            bound=bound,
            prices=known.prices,
        )
        over = _overfull(timeline.profile(solution.choices) - rooms)
        if over and solution.status == "interrupted":
            raise KeyboardInterrupt
        known = Known(
            moments=tuple(sorted({*known.moments, *over})),
            prices={**known.prices, **solution.prices},
            plans=(solution.choices, *solution.others),
        )
        if set(over) <= set(moments):
            return solution, known
        # With more limits no plan gets faster.
        moments, bound = known.moments, solution.bound_s


def _overfull(over: np.ndarray) -> list[int]:
    """The worst moment of the forward, of the backward and of the whole step, where they are over the limit."""
    half = len(over) // 2
    worst = {
        int(np.argmax(over)),
        int(np.argmax(over[:half])) if half else 0,
        half + int(np.argmax(over[half:])),
        len(over) - 1,
    }
    return [moment for moment in worst if over[moment] > 0]


def _infeasible(error: Infeasible, prepared: Draft) -> Infeasible:
    limit = prepared.limit
    return Infeasible(
        f"'memory_limit_bytes' and 'constraints' must leave a plan, got a memory limit of {limit} bytes per "
        "device on mesh "
        f"{prepared.formulation.mesh}: {error}; use more devices, a smaller batch or a higher limit, or drop "
        "constraints"
    )

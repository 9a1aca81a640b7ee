"""A pipeline joined to sharding: a mesh for each pipeline rank and a number of micro-batches, and the fastest plan of
that kind. Which meshes and numbers are tried is planner/stages/degrees.py's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from torch import nn

from ...cost_models.collectives import axis_collective_s
from ...cost_models.links import axis_link, pipeline_mesh
from ...passes.microbatches import microbatch
from ...plans.errors import Infeasible
from ...plans.meshes import Mesh
from ...plans.plan import Memory, Plan, Predicted
from ..api import Draft, draft
from ..fitting import Known, within_rooms
from ..pipeline import Clock
from ..sharding.accumulation import Accumulation, Reduce
from ..sharding.write import write_plan
from ..solver.problem import Solution
from .shares import shares_of
from .staging import Staged, stage_units
from .units import Unit, units_of

__all__ = [
    "Degrees",
    "Joined",
    "bare_plan",
    "joined_draft",
    "memory_of",
    "polished",
    "rank_limits",
    "scaled_interval",
    "sending",
    "solve_joined",
    "solved_units",
]

Stager = Callable[[Solution], Staged]

# How often the memory that the sharding may fill is corrected by what the pipeline's ranks take.
_ROUNDS = 5
# Seconds for the first pipeline of a sharding; `polished` takes its time.
_DRAFT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """`pipeline` ranks, each with devices in a `mesh`, and a batch in `microbatches`."""

    pipeline: int
    mesh: Mesh
    microbatches: int

    @property
    def devices(self) -> int:
        """How many devices that takes."""
        return self.pipeline * self.mesh.size

    def __str__(self) -> str:
        return f"{self.pipeline} x {self.mesh}, {self.microbatches} micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A sharding and the pipeline of its units; `bound_s` is a step time that no plan of these degrees beats. Where
    memory never `binds`, plans that only save memory are no faster."""

    degrees: Degrees
    prepared: Draft
    solution: Solution
    staged: Staged
    bound_s: float
    binds: bool = True

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.staged.step_s

    def plan(self) -> Plan:
        """As a plan, for the cluster that was asked for."""
        return _written(self)


def joined_draft(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    degrees: Degrees,
    *,
    reduce: Reduce = "step",
    **request: Any,
) -> Draft:
    """The problem of one micro-batch on the mesh of a pipeline rank; gradients are reduced once in a step or in each
    micro-batch."""
    one = microbatch(args, kwargs, degrees.microbatches)
    accumulation = Accumulation(microbatches=degrees.microbatches, reduce=reduce)
    return draft(model, *one, mesh=degrees.mesh, accumulation=accumulation, stage_of=degrees.pipeline, **request)


def solve_joined(
    prepared: Draft,
    degrees: Degrees,
    *,
    schedule: str = "auto",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    solver: str = "highs",
    better_than_s: float | None = None,
    stage: Stager | None = None,
    warm: Sequence[int] | None = None,
) -> Joined | None:
    """The sharding of `prepared` and a pipeline of its units within memory: the one that `stage` makes of a solution,
    by default the fastest that is found. `warm` is a sharding to start from.

    The sharding is held to an estimate of what a rank takes (`Timeline.staged`), with one micro-batch in flight per
    rank; what the ranks of the pipeline really take corrects that, as a count corrects a plan without one. None when no
    plan of these degrees takes less than `better_than_s` seconds. Raises Infeasible when none fits.
    """
    ranks, count = degrees.pipeline, degrees.microbatches
    limits = rank_limits(prepared, ranks)
    limit = sum(limits) / ranks
    estimate = copy.copy(prepared)
    estimate.timeline = prepared.timeline.staged(ranks, min(ranks, count))
    send_s = sending(prepared, degrees)
    clock = Clock(limit_s=time_limit_s)
    room, too_much, known = limit, np.inf, Known(plans=() if warm is None else (tuple(warm),))
    failed: Infeasible | None = None
    for round_ in range(_ROUNDS):
        left = max(1.0, clock.left_s / (_ROUNDS - round_))
        rooms = np.full(estimate.timeline.end + 1, room)
        try:
            solution = within_rooms(estimate, rooms, left, known, gap=gap, solver=solver)
        except Infeasible as error:
            failed = failed or error
            if too_much == np.inf:
                break
            room = (room + too_much) / 2
            continue
        bound = max(0.0, solution.bound_s) * count / ranks
        if better_than_s is not None and bound >= better_than_s:
            return None
        if stage is not None:
            staged = stage(solution)
        else:
            units = solved_units(prepared, solution)
            search = Clock(limit_s=min(_DRAFT_S, max(0.5, 0.1 * clock.left_s)))
            staged = stage_units(units, ranks, count, send_s=send_s, limits=limits, schedule=schedule, clock=search)
        over = staged.over_bytes(limits)
        if over <= 0:
            binds = round_ > 0 or any(price > 0 for price in solution.prices.values())
            return Joined(
                degrees=degrees, prepared=prepared, solution=solution, staged=staged, bound_s=bound, binds=binds
            )
        failed = Infeasible(f"the fullest device takes {over} bytes too much")
        too_much = min(too_much, room)
        room *= max(0.5, 0.98 * limit / (limit + over))
    raise Infeasible(
        f"'memory_limit_bytes' must leave a plan of {degrees}, got {min(limits)} bytes per device: {failed}; use more "
        "devices, smaller micro-batches or a higher limit"
    ) from failed


def rank_limits(prepared: Draft, ranks: int) -> tuple[int, ...]:
    """Bytes that a device of each of `ranks` pipeline ranks may fill: the limit that was asked for, or that of the
    smallest of its devices."""
    own = prepared.cluster.memory_bytes
    if prepared.options.memory_limit_bytes is not None or not isinstance(own, tuple):
        return (prepared.limit,) * ranks
    size = prepared.formulation.mesh.size
    return tuple(min(own[rank * size : (rank + 1) * size]) for rank in range(ranks))


def polished(joined: Joined, seconds: float, schedule: str = "auto") -> Joined:
    """The same sharding with the best pipeline found in so many seconds more."""
    degrees, prepared = joined.degrees, joined.prepared
    limits = rank_limits(prepared, degrees.pipeline)
    if degrees.pipeline == 1 or schedule != "auto":
        return joined
    staged = stage_units(
        joined.staged.units, degrees.pipeline, degrees.microbatches,
        send_s=sending(prepared, degrees), limits=limits, clock=Clock(limit_s=seconds),
    )  # fmt: skip
    if staged.over_bytes(limits) > 0 or staged.step_s >= joined.step_s:
        return joined
    return replace(joined, staged=staged)


def solved_units(prepared: Draft, solution: Solution, *, starts: Sequence[str] | None = None) -> list[Unit]:
    """The units of a solution, see `units_of`."""
    shares = shares_of(prepared.formulation, solution.choices)
    plan, accumulation = bare_plan(prepared, solution), prepared.formulation.accumulation
    return units_of(prepared.captured, plan, prepared.blocks, shares, accumulation, starts=starts)


def bare_plan(prepared: Draft, solution: Solution) -> Plan:
    """The plan of the sharding alone, its memory not yet counted."""
    return write_plan(
        prepared.formulation,
        prepared.timeline,
        solution,
        model=prepared.model(),
        cluster=prepared.cluster,
        options=prepared.options,
        limit=prepared.limit,
    )


def sending(prepared: Draft, degrees: Degrees) -> Callable[[float], float]:
    """Seconds of handing bytes from one pipeline rank to the next."""
    if degrees.pipeline == 1:
        return lambda size: 0.0
    whole = pipeline_mesh(degrees.mesh, degrees.pipeline)
    link = axis_link(prepared.cluster, whole, 0, prepared.formulation.prices.device)
    return lambda size: float(axis_collective_s("point_to_point", size, link))


def _written(joined: Joined) -> Plan:
    """The plan: layouts and times of one micro-batch in its nodes, the whole step in what is predicted."""
    prepared, staged, degrees = joined.prepared, joined.staged, joined.degrees
    plan = bare_plan(prepared, joined.solution)
    one, times = plan.predicted, degrees.microbatches / degrees.pipeline
    gap = max(0.0, 1.0 - joined.bound_s / joined.step_s) if joined.step_s > 0 else 0.0
    predicted = Predicted(
        step_time_s=joined.step_s,
        step_time_interval_s=scaled_interval(one, joined.step_s),
        compute_s=one.compute_s * times,
        exposed_communication_s=min(one.exposed_communication_s * times, joined.step_s),
        hidden_communication_s=one.hidden_communication_s * times,
        optimizer_s=one.optimizer_s * times,
        recompute_s=one.recompute_s * times,
        memory=memory_of(staged, rank_limits(prepared, degrees.pipeline)),
    )
    solver = msgspec.structs.replace(
        plan.solver,
        status="feasible" if gap > 1e-6 else joined.solution.status,
        objective_s=joined.step_s,
        bound_s=min(joined.bound_s, joined.step_s),
        gap=gap,
    )
    return msgspec.structs.replace(
        plan, predicted=predicted, solver=solver, pipeline=staged.pipeline(prepared.formulation.accumulation.reduce)
    )


def scaled_interval(one: Predicted, step_s: float) -> tuple[float, float] | None:
    """The interval of one micro-batch, as widely around the whole step."""
    if one.step_time_interval_s is None or one.step_time_s <= 0:
        return None
    low, high = one.step_time_interval_s
    return low * step_s / one.step_time_s, high * step_s / one.step_time_s


def memory_of(staged: Staged, limits: Sequence[int]) -> Memory:
    """What the device holds that has least left: its stages' tensors throughout, the rest at the fullest moment."""
    rank = int(np.argmax(np.subtract(staged.peaks, limits)))
    edges = [0, *staged.cuts, len(staged.units)]
    mine = [u for s in staged.schedule.stages_of(rank) for u in staged.units[edges[s] : edges[s + 1]]]
    parts = [sum(getattr(u, f"{kind}_bytes") for u in mine) for kind in ("parameters", "gradients", "optimizer")]
    return Memory(
        parameters_bytes=parts[0],
        gradients_bytes=parts[1],
        optimizer_bytes=parts[2],
        activations_bytes=staged.peaks[rank] - sum(parts),
        gathered_bytes=0,
        communication_bytes=0,
        other_bytes=0,
        peak_bytes=staged.peaks[rank],
        limit_bytes=limits[rank],
    )

"""Which plan the processes that are left train by, and who plays which of its ranks: `replan`, asked by the runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from torch import nn

from ...passes.placing import on_meta
from ...plans.errors import Infeasible
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ...plans.replacements import Replacement
from ...plans.uneven import Uneven
from ..api import LossFunction, plan
from ..apply import here
from ..replanning.choices import fitted
from ..replanning.replan import least_copies, ranks_of, replanned
from ..replanning.solved import Shelf, Solved
from ..sharding.constraints import Constraint
from .portions import Group, Portions, groups_by_rule, groups_of, portions_for

__all__ = ["Assigned", "Request", "answer", "assigned", "fitting_mesh", "replacement"]


# Others wait while one plans.
_REPLAN_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is to be planned: as for `mw.plan`. `mesh` is that of the first processes, or a function of their number;
    `horizon_s` the seconds to the next failure, see `replan`; `uneven`: samples may be computed each by itself."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]
    loss: LossFunction | None = None
    mesh: Mesh | str | Callable[[int], Mesh | str] | None = None
    first: Plan | None = None
    horizon_s: float | None = None
    uneven: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def solved(self, shelf: Shelf | None = None) -> Solved:
        """Nothing solved yet, beside what is on `shelf`. Weights are not kept for it."""
        rules, model = self.options.get("rules", ()), on_meta(self.model, buffers=False)
        return Solved(
            model=model, args=self.args, kwargs=self.kwargs, loss=self.loss, rules=rules, shelf=shelf
        )  # fmt: skip


class Assigned(Struct, frozen=True, kw_only=True):
    """The file of a plan, or of replicas of unlike sizes, and who plays its ranks, by the numbers of processes; all
    others are idle."""

    plan: bytes
    ranks: tuple[int, ...]
    predicted_s: float = 0.0


def assigned(
    request: Request,
    members: Sequence[int],
    base: tuple[Plan, Sequence[int]] | None,
    speeds: Mapping[int, float],
    solved: Solved,
) -> Assigned:
    """The plan for the processes `members`, some of which are slow; `base` is the plan so far and who played it.

    The same plan goes on where as many healthy ones are there; another one comes from `replan`. Raises Infeasible when
    no plan fits.
    """
    healthy = not any(who in speeds for who in members)
    if base is None:
        first = request.first if request.first is not None and ranks_of(request.first) == len(members) else None
        return _written(first or _first(request, len(members)), members)
    before, ranks = base
    left = [who for who in ranks if who in members]
    fresh = [who for who in members if who not in ranks]
    if healthy and ranks_of(before) == len(members):
        # Newcomers take the places of those that are lost.
        comers = iter(fresh)
        return _written(before, [who if who in members else next(comers) for who in ranks])
    if healthy and request.first is not None and ranks_of(request.first) == len(members):
        return _written(request.first, [*left, *fresh])
    devices = [*ranks, *fresh]
    health = {at: 0.0 if who not in members else speeds.get(who, 1.0) for at, who in enumerate(devices)}
    found, places = answer(request, before, health, len(fresh), solved)
    if isinstance(found, Portions):
        uneven = Uneven(whole=before, played=tuple(ranks), portions=found.portions)
        return Assigned(
            plan=uneven.to_bytes(), ranks=tuple(devices[at] for at in places), predicted_s=found.step_s
        )  # fmt: skip
    return _written(found, [devices[at] for at in places])


def answer(
    request: Request, before: Plan, health: Mapping[int, float], added: int, solved: Solved
) -> tuple[Plan | Portions, tuple[int, ...]]:
    """The faster of what `replan` gives and of replicas of unlike sizes, where those may be; who plays the ranks, by
    the ranks of `before`. Infeasible where neither fits."""
    size = ranks_of(before)
    speeds = {device: health.get(device, 1.0) for device in range(size) if health.get(device, 1.0) > 0}
    fresh = [size + at for at in range(added) if health.get(size + at, 1.0) > 0]
    rule = request.mesh(len(speeds) + len(fresh)) if callable(request.mesh) else None
    groups: list[Group] = []
    if isinstance(rule, str) and "+" in rule:
        groups = groups_by_rule(rule, before, [*speeds, *fresh])
    elif request.uneven and rule is None:
        groups = groups_of(before, speeds, fresh)
    found = None if not groups else portions_for(before, groups, speeds, solved, time_limit_s=_REPLAN_S / 2)
    if found is not None and isinstance(rule, str):
        return found, found.devices
    try:
        even = replacement(request, before, health, added, solved)
    except Infeasible:
        if found is None:
            raise
        return found, found.devices
    if found is not None and len(found.portions) > 1 and found.step_s < even.step_time_s:
        return found, found.devices
    return even.plan, even.devices


def replacement(request: Request, before: Plan, health: Mapping[int, float], added: int, solved: Solved) -> Replacement:
    """`replan` for the job of `request` with `added` more devices; also asked ahead of a failure (ahead.py)."""
    alive = sum(health.get(device, 1.0) > 0 for device in range(ranks_of(before) + added))
    rule = request.mesh(alive) if callable(request.mesh) else None
    given = request.options.get("constraints", ())
    if given:
        # An axis that had one device for a while may be split again.
        texts = tuple(str(one) for one in _constraints(given, before.mesh.ndim))
        before = msgspec.structs.replace(before, options=msgspec.structs.replace(before.options, constraints=texts))
    return replanned(
        before, health, solved, mesh=rule, added=[before.cluster.nodes - 1] * added, horizon_s=request.horizon_s,
        copies=min(2, least_copies(before)), time_limit_s=_REPLAN_S,
    )  # fmt: skip


def _written(found: Plan, ranks: Sequence[int]) -> Assigned:
    return Assigned(plan=found.to_bytes(), ranks=tuple(ranks), predicted_s=found.predicted.step_time_s)


def _first(request: Request, ranks: int) -> Plan:
    """The plan to begin with."""
    options = {"compiled": False, **request.options}
    cluster = options.pop("cluster", None) or here(ranks)
    joined = options.get("pipeline") is not None or options.get("microbatches") is not None
    asked = request.mesh(ranks) if callable(request.mesh) else request.mesh
    mesh = Mesh.parse(asked) if isinstance(asked, str) else asked
    if mesh is None and not joined:
        mesh = Mesh.of((ranks,)) if request.first is None else request.first.mesh
    if mesh is not None and not joined and not callable(request.mesh):
        mesh = fitting_mesh(mesh, ranks)
    if mesh is not None:
        options["constraints"] = fitted(options.get("constraints", ()), mesh)
    options |= {"cluster": cluster, "loss": request.loss}
    found = plan(request.model, request.args, request.kwargs, mesh=mesh, **options)
    if found.stage_meshes is UNSET or found.pipeline is None:
        return found
    # State is moved between plans whose pipeline ranks all have one mesh.
    options |= {"pipeline": found.pipeline.ranks, "microbatches": found.pipeline.microbatches}
    return plan(request.model, request.args, request.kwargs, mesh=found.mesh, **options)


def _constraints(given: Sequence[str | Constraint], axes: int) -> list[Constraint]:
    return [Constraint.parse(one, axes) if isinstance(one, str) else one for one in given]


def fitting_mesh(first: Mesh, ranks: int) -> Mesh:
    """A mesh of `ranks` with the axes of `first`, its last axes kept as far as they divide: constraints still fit it.

    2x4 becomes 3x2 on 6 ranks, 7x1 on 7."""
    shape: list[int] = []
    for size in reversed(first.shape[1:]):
        shape.append(math.gcd(size, ranks))
        ranks //= shape[-1]
    return Mesh((ranks, *reversed(shape)), first.axis_names)

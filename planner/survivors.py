"""Which plan the processes that are left train by: the one place where a replanner takes over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..plans.errors import RequestError
from ..plans.meshes import Mesh
from ..plans.plan import Plan
from .api import LossFunction, plan
from .apply import here
from .constraints import Constraint

__all__ = ["Request", "fitting_mesh", "plan_for"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is to be planned: as for `mw.plan`. `mesh` is that of the first processes, or a function of their number."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]
    loss: LossFunction | None = None
    mesh: Mesh | str | Callable[[int], Mesh | str] | None = None
    first: Plan | None = None
    options: dict[str, Any] = field(default_factory=dict)


def plan_for(request: Request, ranks: int, before: Plan | None) -> Plan:
    """A plan for `ranks` processes; the one `before`, if there is one, where it is for as many.

    Raises Infeasible when no plan fits so few.
    """
    for known in (before, request.first):
        if known is not None and known.mesh.size == ranks:
            return _without_pipeline(known)
    options = {"compiled": False, **request.options}
    cluster = options.pop("cluster", None) or here(ranks)
    mesh = _mesh(request, ranks, before)
    options["constraints"] = [_fitting(c, mesh) for c in options.get("constraints", ())]
    found = plan(
        request.model,
        request.args,
        request.kwargs,
        cluster=cluster,
        mesh=mesh,
        loss=request.loss,
        **options,
    )
    return _without_pipeline(found)


def _without_pipeline(found: Plan) -> Plan:
    if found.pipeline is not None:
        raise RequestError(
            f"'plan' must be without a pipeline for elastic training, got one of {found.pipeline.ranks} ranks; plan "
            "with pipeline=None"
        )
    return found


def _mesh(request: Request, ranks: int, before: Plan | None) -> Mesh:
    asked = request.mesh
    if callable(asked):
        asked = asked(ranks)
        return Mesh.parse(asked) if isinstance(asked, str) else asked
    first = Mesh.parse(asked) if isinstance(asked, str) else asked
    if first is None:
        known = request.first or before
        first = Mesh.of((ranks,)) if known is None else known.mesh
    return fitting_mesh(first, ranks)


def _fitting(given: str | Constraint, mesh: Mesh) -> Constraint:
    """A constraint for a mesh on which axes may have shrunk to one device, along which nothing can be split."""
    found = Constraint.parse(given, mesh.ndim) if isinstance(given, str) else given
    if found.forbids:
        return found
    kept = (None if size == 1 else part for part, size in zip(found.layout, mesh.shape, strict=True))
    return replace(found, layout=tuple(kept))


def fitting_mesh(first: Mesh, ranks: int) -> Mesh:
    """A mesh of `ranks` with the axes of `first`, its last axes kept as far as they divide: constraints still fit it.

    2x4 becomes 3x2 on 6 ranks, 7x1 on 7."""
    shape: list[int] = []
    for size in reversed(first.shape[1:]):
        shape.append(math.gcd(size, ranks))
        ranks //= shape[-1]
    return Mesh((ranks, *reversed(shape)), first.axis_names)

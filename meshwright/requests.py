"""What the command line asks of the rooms: a SPEC in words becomes a model, and the planner's calls are made on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from .planner.adapt import adapt, differences, reprice
from .planner.api import plan
from .planner.arguments import check_arguments
from .planner.checking.check import CheckReport
from .planner.checking.verify import check
from .planner.explaining.conflicts import explain_infeasible
from .planner.explaining.explain import explain
from .planner.explaining.price_notes import PriceNote, price_of
from .planner.explaining.streams import Streams, streams_of
from .planner.replanning.replan import replan as replan_plan
from .plans import (
    Adapted,
    Cluster,
    Explanation,
    Health,
    Infeasible,
    Mesh,
    Origin,
    Plan,
    Replacement,
    ReplayError,
    RequestError,
)
from .specs import load_spec

__all__ = [
    "adapt_spec", "check_spec", "explain_spec", "plan_spec", "price_spec", "replan", "replay_spec", "streams_spec",
]  # fmt: skip

# Seconds, at most, for finding out why nothing fits.
_CONFLICT_S = 30.0


def plan_spec(
    spec: str,
    *,
    cluster: Cluster,
    mesh: Mesh | None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    layers: int | None = None,
    **options: Any,
) -> Plan:
    """The plan of the model that `spec` names; `options` are those of `meshwright.plan`."""
    found = load_spec(spec, batch=global_batch, seq_len=seq_len, layers=layers)
    model, args, kwargs = found.build()
    options |= {"loss": found.loss, "name": found.name, "dynamic": found.dynamic}
    request = {"cluster": cluster, "mesh": mesh, **options}
    try:
        made = plan(model, args, kwargs, **request)
    except Infeasible as error:
        if request.get("pipeline") is not None or request.get("microbatches") is not None:
            raise  # what conflicts is looked for in a step of one micro-batch on all devices
        raise _with_conflict(error, (model, args, kwargs), request) from error
    origin = Origin(spec=spec, global_batch=global_batch, seq_len=seq_len, layers=layers)
    return msgspec.structs.replace(made, model=msgspec.structs.replace(made.model, origin=origin))


def _with_conflict(error: Infeasible, call: tuple[Any, tuple, dict], request: dict[str, Any]) -> Infeasible:
    """`error`, and the limits that conflict; finding them takes at most as long as was given for planning."""
    limit_s = min(_CONFLICT_S, request.pop("time_limit_s", _CONFLICT_S))
    conflict = explain_infeasible(*call, **request, time_limit_s=limit_s)
    told = Infeasible(f"{error}\n{conflict}")
    told.conflict = conflict
    return told


def explain_spec(plan: Plan, names: Sequence[str], spec: str | None, **options: Any) -> Explanation:
    """Why `plan` is as it is; the model is that of `spec`, or of the SPEC that the plan records. `options` are those
    of `meshwright.explain`."""
    origin = plan.model.origin
    if spec is None and origin is None:
        return explain(plan, names)
    size = {} if origin is None else {"batch": origin.global_batch, "seq_len": origin.seq_len, "layers": origin.layers}
    found = load_spec(spec or (origin.spec if origin else ""), **size)
    model, args, kwargs = found.build()
    return explain(plan, names, model, args, kwargs, loss=found.loss, **options)


def price_spec(plan: Plan, name: str, spec: str | None, *, calibration: str | None = None) -> PriceNote:
    """How the price of op `name` of `plan` comes about; the model is that of `spec`, or of the SPEC in the plan."""
    model, args, kwargs, loss = _planned(plan, spec)
    return price_of(plan, name, model, args, kwargs, loss=loss, calibration=calibration)


def streams_spec(plan: Plan, spec: str | None, **options: Any) -> Streams:
    """The step of `plan` on streams; the model is that of `spec`, or of the SPEC in the plan."""
    model, args, kwargs, loss = _planned(plan, spec)
    return streams_of(plan, model, args, kwargs, loss=loss, **options)


def _planned(plan: Plan, spec: str | None) -> tuple[Any, tuple, dict, Any]:
    """Model, arguments and loss of `spec`, or of the SPEC that the plan records, at its sizes."""
    origin = plan.model.origin
    if spec is None and origin is None:
        raise RequestError("'SPEC' must be given for a plan that records none, got none; name the model after the plan")
    size = {} if origin is None else {"batch": origin.global_batch, "seq_len": origin.seq_len, "layers": origin.layers}
    found = load_spec(spec or (origin.spec if origin else ""), **size)
    model, args, kwargs = found.build()
    return model, args, kwargs, found.loss


def check_spec(
    spec: str,
    mesh: Mesh,
    *,
    plan: Plan | None = None,
    ranks: str = "simulated",
    random: int | None = None,
    seed: int = 0,
    global_batch: int | None = None,
    seq_len: int | None = None,
    layers: int | None = None,
    **options: Any,
) -> CheckReport:
    """Whether the model that `spec` names computes the same when it is split over `mesh`."""
    size = {"batch": global_batch, "seq_len": seq_len, "layers": layers}
    model, args, kwargs, outer = _built(spec, size)
    dynamic = load_spec(spec, **size).dynamic
    build = partial(_built, spec, size) if ranks == "gloo" else None
    return check(
        model,
        args,
        kwargs,
        mesh=mesh,
        plan=plan,
        loss=outer,
        random=random or 0,
        seed=seed,
        build=build,
        dynamic=dynamic,
        **options,
    )


def _built(spec: str, size: dict[str, int | None]) -> tuple[Any, tuple, dict[str, Any], Callable | None]:
    """The model, the same in every process: a file that draws its weights draws them from one seed."""
    import torch

    found = load_spec(spec, **size)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return *found.build(), found.loss


def replay_spec(
    plan: Plan,
    spec: str,
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    layers: int | None = None,
    calibration: str | None = None,
) -> Plan:
    """`plan` itself at today's prices, or at those of a calibration file, once it is sure that it fits the model of
    `spec`.

    ReplayError names the first difference, and what else is new or gone.
    """
    call, loss = _call(spec, *_sizes(plan, spec, global_batch, seq_len, layers))
    try:
        return reprice(plan, *call, loss=loss, calibration=calibration)
    except ReplayError as error:
        if "version" in str(error):
            raise
        told = differences(plan, *call, loss=loss)
        if told.same:
            raise
        raise ReplayError(
            f"{error}\n{told.differences()}\n--adapt carries over what is the same and solves for the rest"
        ) from error


def adapt_spec(
    plan: Plan,
    spec: str,
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    layers: int | None = None,
    calibration: str | None = None,
) -> Adapted:
    """`plan` carried over to the model of `spec`."""
    global_batch, seq_len, layers = _sizes(plan, spec, global_batch, seq_len, layers)
    call, loss = _call(spec, global_batch, seq_len, layers)
    found = adapt(plan, *call, loss=loss, calibration=calibration)
    origin = Origin(spec=spec, global_batch=global_batch, seq_len=seq_len, layers=layers)
    model = msgspec.structs.replace(found.plan.model, origin=origin)
    return msgspec.structs.replace(found, plan=msgspec.structs.replace(found.plan, model=model))


def _sizes(
    plan: Plan, spec: str, batch: int | None, seq_len: int | None, layers: int | None
) -> tuple[int | None, int | None, int | None]:
    """Batch, sequence length and layers as given, else as the plan records them; of another SPEC, which may have other
    ones, only as given."""
    origin = plan.model.origin
    if origin is None or origin.spec != spec:
        return batch, seq_len, layers
    return batch or origin.global_batch, seq_len or origin.seq_len, layers or origin.layers


def _call(spec: str, batch: int | None, seq_len: int | None, layers: int | None) -> tuple[tuple, Callable | None]:
    found = load_spec(spec, batch=batch, seq_len=seq_len, layers=layers)
    return found.build(), found.loss


def replan(
    plan: Plan,
    health: Mapping[int, float] | Health,
    model: Any = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    spec: str | None = None,
    loss: Callable | None = None,
    **options: Any,
) -> Replacement:
    """The plan that takes over when devices are dead (0) or slow (below 1), and what moves; devices are ranks of
    `plan`. The model is `model` with its inputs of the whole batch, or that of `spec`, or the one that the plan
    records. `options` are those of
    `meshwright.planner.replanning.replan.replan`: horizon_s, tries, time_limit_s, rules."""
    check_arguments(plan=plan, spec=spec)
    if model is None:
        origin = plan.model.origin
        if spec is None and origin is None:
            raise RequestError(
                "'model' must be given where the plan records no SPEC that it was made from, got none; give the model "
                "and its inputs"
            )
        size = {}
        if origin is not None:
            size = {"batch": origin.global_batch, "seq_len": origin.seq_len, "layers": origin.layers}
        found = load_spec(spec or (origin.spec if origin else ""), **size)
        (model, args, kwargs), loss = found.build(), found.loss
    return replan_plan(plan, health, model, args, kwargs, loss=loss, **options)

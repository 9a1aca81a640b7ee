"""What a parallel model and its optimizer hold on this rank, taken apart into plain tensors and put together again.

parameter        "layers.0.wq.weight"             its local piece
buffer           "rope"                           likewise
optimizer state  "layers.0.wq.weight::exp_avg"    lies as its parameter where it has the parameter's shape
                 "layers.0.wq.weight::step"       whole on every rank otherwise
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..plans.errors import CheckError, RequestError
from ..plans.layouts import Layout
from ..plans.migration import Carried, Place, Places
from ..plans.plan import Plan
from .graph import Captured
from .hooks import carry_hooks
from .lookup import PlanLookup
from .placing import placements_of, put
from .stages import cut_stages
from .transfer import Part

__all__ = [
    "Holders",
    "Kind",
    "Spread",
    "as_dtensor",
    "carried_kinds",
    "dtype_of",
    "holders_of",
    "kinds_of",
    "local_pieces",
    "parts",
    "put_together",
    "tensors_of",
]


class Kind(Struct, frozen=True, kw_only=True):
    """A tensor of the training state: its global shape and dtype, the plan's tensor that it lies as (None: it is whole
    on every rank), and the kind of device that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    like: str | None
    device: str = "cpu"


# The pipeline ranks that hold each parameter and buffer; None where there is no pipeline.
Holders = Mapping[str, tuple[int, ...]] | None


def holders_of(captured: Captured, plan: Plan) -> Holders:
    """Which pipeline ranks of `plan` hold each parameter and buffer; `captured` is its model on one micro-batch."""
    if plan.pipeline is None:
        return None
    found: dict[str, set[int]] = {}
    stages = plan.pipeline.stages
    for stage, program in zip(stages, cut_stages(captured, [one.first for one in stages]), strict=True):
        for source in program.captured.sources.values():
            if source.kind in ("parameter", "buffer"):
                found.setdefault(source.name, set()).add(stage.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def dtype_of(kind: Kind) -> torch.dtype:
    """The dtype as torch's object."""
    return getattr(torch, kind.dtype)


def _all(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str | None, torch.Tensor]]:
    """Every tensor: its label, the tensor that it lies as, itself."""
    for name, parameter in model.named_parameters():
        yield name, name, parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise RequestError(
                    f"'optimizer' must keep its state in tensors, got {key} of {name}, {type(value).__name__}; use "
                    "another optimizer"
                )
            if not isinstance(value, DTensor):
                yield f"{name}::{key}", None, value
            elif not isinstance(parameter, DTensor) or value.placements != parameter.placements:
                raise RequestError(
                    f"'optimizer' must keep state that lies as its parameter, or whole, got {key} of {name} with "
                    f"{value.placements}; use another optimizer"
                )
            elif value.shape != parameter.shape:
                raise RequestError(
                    f"'optimizer' must keep state of its parameter's shape, got {key} of {name} with shape "
                    f"{list(value.shape)}; use another optimizer"
                )
            else:
                yield f"{name}::{key}", name, value
    for name, buffer in model.named_buffers():
        yield name, name, buffer


def kinds_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Kind, ...]:
    """What there is to carry over, the same on every rank."""
    return tuple(
        Kind(
            name=label, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), like=like, device=t.device.type
        )
        for label, like, t in _all(model, optimizer)
    )


def local_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What this rank holds of each of them; not copies."""
    return {label: (t.to_local() if isinstance(t, DTensor) else t).detach() for label, _, t in _all(model, optimizer)}


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All of them as they are: DTensors where they are split."""
    return {label: tensor.detach() for label, _, tensor in _all(model, optimizer)}


class Spread:
    """Where a training state lies: by a plan whose ranks are played by `ranks`, or by a plan for each of several
    replicas. `holders` are those of a plan with a pipeline (see `holders_of`)."""

    def __init__(self, portions: Sequence[tuple[Plan, tuple[int, ...], Holders]]) -> None:
        self.portions = [(PlanLookup(plan), ranks, holders) for plan, ranks, holders in portions]

    def place(self, kind: Kind) -> Place | Places:
        """Where a tensor lies."""
        found = tuple(_place(kind, *portion) for portion in self.portions)
        return found[0] if len(found) == 1 else Places(parts=found)


def _place(kind: Kind, lookup: PlanLookup, ranks: tuple[int, ...], holders: Holders) -> Place:
    mesh = lookup.plan.mesh
    layout: Layout = (None if kind.like is None else lookup.layout(kind.like)) or ("R",) * mesh.ndim
    if holders is None:
        return Place(layout=layout, mesh=mesh, ranks=ranks)
    # What no stage reads is on all pipeline ranks.
    stages = holders.get(kind.name.partition("::")[0], tuple(range(len(ranks) // mesh.size)))
    return Place.in_stages(layout, mesh, ranks, stages)


def parts(
    kinds: Sequence[Kind], spread: Spread, me: int, pieces: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Part]:
    """This rank's part of each tensor that it holds, in `pieces`, or in new tensors that are not initialised.

    CheckError where a piece has another shape than the plan says."""
    found = dict[str, Part]()
    for kind in kinds:
        place = spread.place(kind)
        if me not in place.ranks:
            continue
        box = place.box(kind.shape, me) if all(kind.shape) else None
        # An empty piece keeps the shape that DTensor gives it; nothing is sent for it.
        shape = place.local_shape(kind.shape, me)
        local = torch.empty(shape, dtype=dtype_of(kind), device=kind.device) if pieces is None else pieces[kind.name]
        if tuple(local.shape) != shape:
            raise CheckError(f"{kind.name} must have a piece of shape {shape} on rank {me}, got {tuple(local.shape)}")
        found[kind.name] = Part(box=box or tuple((0, n) for n in shape), local=local)
    return found


def carried_kinds(kinds: Sequence[Kind], before: Spread, after: Spread) -> Iterator[Carried]:
    """The tensors with the places they have and will have."""
    for kind in kinds:
        yield Carried(
            name=kind.name, shape=kind.shape, dtype=kind.dtype, before=before.place(kind), after=after.place(kind)
        )


def as_dtensor(local: torch.Tensor, kind: Kind, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A piece as a DTensor of its global shape, which uneven pieces do not tell by themselves."""
    stride = torch.empty(kind.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements_of(layout), run_check=False, shape=torch.Size(kind.shape), stride=stride
    )


def put_together(
    model: nn.Module,
    optimizer_for: Any,
    kinds: Sequence[Kind],
    pieces: Mapping[str, torch.Tensor],
    device_mesh: DeviceMesh,
) -> torch.optim.Optimizer:
    """Give `model`, parallel and without values, its `pieces`, and the state of the optimizer that
    `optimizer_for(model)` makes. CheckError where model and pieces do not fit each other."""
    by_name = {kind.name: kind for kind in kinds}
    values: dict[int, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = by_name.get(name)
        if kind is None or kind.shape != tuple(tensor.shape) or dtype_of(kind) != tensor.dtype:
            raise CheckError(f"{name} must be among what was carried over, with its shape and dtype; it is not")
        value = pieces[name]
        if isinstance(tensor, DTensor):
            value = as_dtensor(value, kind, _layout(tensor), device_mesh)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            carry_hooks(tensor, value)
        values[id(tensor)] = value
    put(model, values)
    optimizer = optimizer_for(model)
    known = dict(model.named_parameters())
    for kind in kinds:
        name, _, key = kind.name.rpartition("::")
        if name in known:
            parameter, value = known[name], pieces[kind.name]
            if kind.like is not None and isinstance(parameter, DTensor):
                value = as_dtensor(value, kind, _layout(parameter), device_mesh)
            optimizer.state[parameter][key] = value
    return optimizer


def _layout(tensor: DTensor) -> Layout:
    found: list[str] = []
    for placement in tensor.placements:
        if type(placement) is not Shard and not isinstance(placement, Replicate):
            raise CheckError(f"a parameter must be whole or split along each axis, got {placement}")
        found.append(f"S({placement.dim})" if isinstance(placement, Shard) else "R")
    return tuple(found)

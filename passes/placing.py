"""Tensors of a model put where a plan wants their pieces, and found there again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..plans.layouts import Layout, shard_dim
from ..plans.meshes import Mesh
from .graph import Captured
from .hooks import carry_hooks
from .simulate import piece

__all__ = [
    "copied",
    "held_by",
    "local_of",
    "of_first_rank",
    "on_meta",
    "placed_on",
    "placements_of",
    "put",
    "tensors_of",
]


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """A layout as DTensor placements."""
    found: list[Placement] = []
    for text in layout:
        dim = shard_dim(text)
        found.append(Shard(dim) if dim is not None else Replicate() if text == "R" else Partial(text[2:-1]))
    return tuple(found)


def tensors_of(model: nn.Module, captured: Captured) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a captured model, by name."""
    return [(s.name, held_by(model, s.name)) for s in captured.sources.values() if s.kind in ("parameter", "buffer")]


def held_by(model: nn.Module, name: str) -> torch.Tensor:
    """The tensor that a model holds under a dotted name."""
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), key)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_meta(model: nn.Module, *, buffers: bool = True) -> nn.Module:
    """A copy of `model` without values; with those of its buffers where `buffers` is False."""
    tensors = (*model.parameters(), *(model.buffers() if buffers else ()))
    return copied(model, {id(tensor): _on_meta(tensor) for tensor in tensors})


def copied(value: Any, memo: Mapping[int, Any], model: nn.Module | None = None) -> Any:
    """A deep copy of `value`, which is `model` or holds it, with what `memo` gives for objects by id. Tensors that a
    module keeps beside its parameters and makes of them, as torch.nn.utils.weight_norm does, are copied by value: the
    next forward makes them anew."""
    held = (model or value).modules()
    made = [t for module in held for t in vars(module).values() if isinstance(t, torch.Tensor) and not t.is_leaf]
    return copy.deepcopy(value, {**{id(t): t.detach().clone() for t in made}, **memo})


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


def of_first_rank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values that rank 0 holds, on `device`: models built without a seed differ from rank to rank."""
    if tensor.device.type == "meta":
        return tensor
    whole = tensor.to(device, copy=True).contiguous()
    dist.broadcast(torch.view_as_real(whole) if whole.is_complex() else whole, src=0)
    return whole


def placed_on(
    tensor: torch.Tensor, values: torch.Tensor, layout: Layout, device_mesh: DeviceMesh, mesh: Mesh
) -> torch.Tensor:
    """A parameter as a DTensor parameter with its hooks; a buffer as a DTensor where it is split, a plain tensor where
    it is whole. `values` are those of the whole tensor, on the mesh's device."""
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    parameter = isinstance(tensor, nn.Parameter)
    local = piece(values, layout, mesh, tuple(coordinate))
    if not parameter and all(p == "R" for p in layout):
        return local
    placed = DTensor.from_local(
        local,
        device_mesh,
        placements_of(layout),
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )
    if not parameter:
        return placed
    made = nn.Parameter(placed, requires_grad=tensor.requires_grad)
    carry_hooks(tensor, made)
    return made


def put(model: nn.Module, pieces: Mapping[int, torch.Tensor | None]) -> None:
    """Replace parameters and buffers of `model` under all of their names, by their ids; None where nothing is held."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if id(tensor) in pieces:
                    held[key] = pieces[id(tensor)]  # type: ignore[assignment]

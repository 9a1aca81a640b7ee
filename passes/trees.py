"""Inputs and outputs of any shape, flattened to tensors and built again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..plans.errors import CaptureError
from . import _torch

__all__ = ["Tree", "flatten", "flatten_call", "flatten_output"]

# What a container holds, by key, and how to make one like it.
_Opened = tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]]
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A flattened value: where its tensors are (`names`) and how to build it again from as many tensors."""

    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    build: Callable[[Sequence[Any]], Any]


def flatten(value: Any, *, what: str) -> tuple[list[torch.Tensor], Tree]:
    """Tensors of `value` in order, and its Tree. Containers: tuple, list, dict, dataclass, Hugging Face ModelOutput,
    and whatever is registered with torch.utils._pytree. CaptureError names any other type that it meets."""
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    constants: list[tuple[str, Any]] = []
    builder = _visit(value, what, what, tensors, names, constants)
    return tensors, Tree(names=tuple(names), constants=tuple(constants), build=lambda new: builder(iter(new)))


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Tree]:
    """Tensors and Tree of the inputs of a call; names are `args.0`, `kwargs.mask`, and so on inwards."""
    tensors, tree = flatten((tuple(args), dict(kwargs)), what="input")
    heads = {"input.0": "args", "input.1": "kwargs"}
    names = tuple(heads[name[:7]] + name[7:] for name in tree.names)
    constants = tuple((heads[name[:7]] + name[7:], value) for name, value in tree.constants)
    return tensors, dataclasses.replace(tree, names=names, constants=constants)


def flatten_output(value: Any) -> tuple[list[torch.Tensor], Tree]:
    """Tensors and Tree of what a model returns. CaptureError where there is no tensor in it: nothing could be trained
    by it."""
    tensors, tree = flatten(value, what="output")
    if not tensors:
        raise CaptureError(
            f"'model' must return a tensor, got {type(value).__name__} without one; return what the loss is made of, "
            "or the loss"
        )
    return tensors, tree


def _visit(value: Any, path: str, what: str, tensors: list, names: list, constants: list) -> Callable[[Any], Any]:
    """Record the tensors in `value`; what builds it again from an iterator over as many."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        names.append(path)
        return next
    if isinstance(value, _CONSTANTS):
        constants.append((path, value))
        return lambda new: value
    items, make = _opened(value, path, what)
    parts = [_visit(item, f"{path}.{key}", what, tensors, names, constants) for key, item in items]
    return lambda new: make([part(new) for part in parts])


def _opened(value: Any, path: str, what: str) -> _Opened:
    """What a container holds, by key, and how to make one like it of other items in that order."""
    kind = type(value)
    if isinstance(value, Mapping):
        keys = list(value)
        if kind in (dict, OrderedDict):
            return list(value.items()), lambda new: kind(zip(keys, new, strict=True))
        return list(value.items()), lambda new: kind(**dict(zip(keys, new, strict=True)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: Sequence[str] = value._fields  # type: ignore[attr-defined]
        return [(key, getattr(value, key)) for key in fields], lambda new: kind(*new)
    if kind in (tuple, list, torch.Size):
        return list(enumerate(value)), kind
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        items = [(name, getattr(value, name)) for name in names]
        return items, lambda new: dataclasses.replace(value, **dict(zip(names, new, strict=True)))
    return _registered(value, path, what)


def _registered(value: Any, path: str, what: str) -> _Opened:
    """A container registered with torch.utils._pytree, or an object without tensors, which is a constant."""
    leaves, spec = _torch.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        if not _holds_tensor(value):
            return [], lambda new: value
        raise CaptureError(
            f"{what!r} must consist of tensors, numbers, strings and containers of them, got {type(value).__name__} at "
            f"{path}; make it a dataclass or register it with torch.utils._pytree.register_pytree_node"
        )
    return list(enumerate(leaves)), lambda new: _torch.tree_unflatten(new, spec)


def _holds_tensor(value: Any) -> bool:
    """Whether tensors hide in the attributes of an unknown object: kept as a constant, it would lose them."""
    return any(isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values())

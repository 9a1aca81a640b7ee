"""Inputs and outputs of any shape, flattened to tensors and built again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..plans.errors import CaptureError

__all__ = ["Tree", "flatten", "flatten_call"]

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


def _visit(value: Any, path: str, what: str, tensors: list, names: list, constants: list) -> Callable[[Any], Any]:
    def many(items: Sequence[tuple[str, Any]]) -> list[Callable[[Any], Any]]:
        return [_visit(item, path + key, what, tensors, names, constants) for key, item in items]

    if isinstance(value, torch.Tensor):
        tensors.append(value)
        names.append(path)
        return next
    if isinstance(value, _CONSTANTS):
        constants.append((path, value))
        return lambda new: value
    if isinstance(value, Mapping):
        parts = many([(f".{key}", item) for key, item in value.items()])
        keys = list(value)
        kind = type(value)
        if kind is dict:
            return lambda new: {key: part(new) for key, part in zip(keys, parts, strict=True)}
        return lambda new: kind(**{key: part(new) for key, part in zip(keys, parts, strict=True)})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = many([(f".{key}", getattr(value, key)) for key in value._fields])
        return lambda new: type(value)(*[part(new) for part in parts])
    if type(value) in (tuple, list, torch.Size):
        parts = many([(f".{index}", item) for index, item in enumerate(value)])
        return lambda new: type(value)([part(new) for part in parts])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        parts = many([(f".{name}", getattr(value, name)) for name in fields])
        return lambda new: dataclasses.replace(value, **{n: part(new) for n, part in zip(fields, parts, strict=True)})
    return _registered(value, path, what, many)


def _registered(value: Any, path: str, what: str, many: Callable) -> Callable[[Any], Any]:
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        if not _holds_tensor(value):
            return lambda new: value
        raise CaptureError(
            f"{what!r} must consist of tensors, numbers, strings and containers of them, got {type(value).__name__} at "
            f"{path}; make it a dataclass or register it with torch.utils._pytree.register_pytree_node"
        )
    parts = many([(f".{index}", leaf) for index, leaf in enumerate(leaves)])
    return lambda new: pytree.tree_unflatten([part(new) for part in parts], spec)


def _holds_tensor(value: Any) -> bool:
    """Whether tensors hide in the attributes of an unknown object, which would be lost if it were kept as a constant."""
    return any(isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values())

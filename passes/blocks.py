"""Repeated blocks of a model: lists of modules that are equal but for their number, and a model with fewer of them.

Two blocks are of one kind when their classes, the shapes and dtypes of their parameters and buffers, and their plain
attributes agree; an attribute that counts the blocks (`layer_idx`) may differ. Capturing three blocks of a deep list
instead of all makes the time of a capture independent of depth."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import nn

__all__ = ["repeated_blocks", "with_fewer_blocks"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def repeated_blocks(model: nn.Module) -> dict[str, int]:
    """Paths of the outermost lists of at least two blocks of one kind, and how many blocks each has."""
    owners = _owners(model)
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}." if other else "") for other in found)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        blocks = list(module)
        if len({id(b) for b in blocks}) == len(blocks) and _all_equal(blocks) and not _shared(blocks, owners):
            found[path] = len(blocks)
    return found


def with_fewer_blocks(model: nn.Module, keep: Mapping[str, int]) -> nn.Module:
    """`model` with the first, middle... and last of `keep[path]` blocks in each list; weights are shared, not
    copied."""
    for path, count in keep.items():
        model = _replaced(model, path.split(".") if path else [], count)
    return model


def _replaced(module: nn.Module, path: list[str], count: int) -> nn.Module:
    new = copy.copy(module)
    new._modules = dict(module._modules)
    if path:
        child = module._modules[path[0]]
        assert child is not None
        new._modules[path[0]] = _replaced(child, path[1:], count)
        return new
    blocks = list(module.children())
    kept = [*blocks[: count - 1], blocks[-1]]
    new._modules = {str(i): block for i, block in enumerate(kept)}
    return new


def _owners(model: nn.Module) -> dict[int, int]:
    """How many names each parameter has."""
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _shared(blocks: Iterable[nn.Module], owners: Mapping[int, int]) -> bool:
    return any(owners[id(p)] > 1 for block in blocks for _, p in block.named_parameters(remove_duplicate=False))


def _all_equal(blocks: list[nn.Module]) -> bool:
    first = _kind(blocks[0], 0)
    return bool(first[1]) and all(_kind(block, index) == first for index, block in enumerate(blocks))


def _kind(block: nn.Module, number: int) -> tuple:
    """What makes a block's kind; attributes equal to the block's own number are left out."""
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False))
    )
    plain = []
    for name, module in block.named_modules():
        hooks = tuple(len(getattr(module, h)) for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
        values = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, _PLAIN) and not (type(v) is int and v == number and k.endswith(("idx", "id", "index")))
        }
        counted = tuple(
            sorted(k for k, v in vars(module).items() if type(v) is int and k.endswith(("idx", "id", "index")))
        )
        plain.append(
            (
                name,
                type(module),
                hooks,
                tuple(sorted((k, repr(v)) for k, v in values.items() if k not in counted)),
                counted,
            )
        )
    return type(block), tensors, tuple(plain)

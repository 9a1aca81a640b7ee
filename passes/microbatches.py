"""The batch of a training step, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..plans.errors import RequestError
from .trees import Tree, flatten_call

__all__ = ["microbatch", "microbatches", "splits"]


def microbatch(args: Sequence[Any], kwargs: dict[str, Any], count: int) -> tuple[tuple, dict[str, Any]]:
    """The inputs of the first of `count` micro-batches, from those of the whole batch."""
    tensors, tree = flatten_call(args, kwargs)
    return tree.build(microbatches(tensors, tree, count)[0])


def microbatches(tensors: Sequence[torch.Tensor], tree: Tree, count: int) -> list[list[torch.Tensor]]:
    """`count` equal parts of the inputs of a step, along dim 0: the batch is the size of dim 0 of the first input that
    has one, and inputs of another size are given whole to each. RequestError where the parts would not be equal."""
    split = splits(tensors)
    for name, tensor, cut in zip(tree.names, tensors, split, strict=True):
        size = tensor.shape[0] if cut else count
        if size % count:
            fitting = [n for n in range(1, size + 1) if size % n == 0]
            raise RequestError(
                f"'microbatches' must divide the batch, got {count} for {size} samples (dim 0 of {name}): the mean "
                f"over unequal micro-batches is not the mean over the batch; plan with one of {fitting[:12]} or give "
                "another batch"
            )
    parts = [t.chunk(count) if cut else (t,) * count for t, cut in zip(tensors, split, strict=True)]
    return [[part[index] for part in parts] for index in range(count)]


def splits(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which inputs are cut along dim 0."""
    batch = next((t.shape[0] for t in tensors if t.dim()), None)
    return [t.dim() > 0 and t.shape[0] == batch for t in tensors]

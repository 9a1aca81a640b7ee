"""The batch of a training step, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..plans.errors import RequestError
from .trees import Tree, flatten_call

__all__ = [
    "first_rows",
    "microbatch",
    "microbatches",
    "samples_of",
    "sizes_of",
    "smaller_microbatch",
    "splits",
    "weights",
]


def microbatch(args: Sequence[Any], kwargs: dict[str, Any], count: int) -> tuple[tuple, dict[str, Any]]:
    """The inputs of the first of `count` micro-batches, which is the largest, from those of the whole batch."""
    tensors, tree = flatten_call(args, kwargs)
    return tree.build(microbatches(tensors, tree, count)[0])


def smaller_microbatch(args: Sequence[Any], kwargs: dict[str, Any], count: int) -> tuple[tuple, dict[str, Any]] | None:
    """The inputs of the last of `count` micro-batches, where it has a sample less than the first."""
    tensors, tree = flatten_call(args, kwargs)
    parts = microbatches(tensors, tree, count)
    return tree.build(parts[-1]) if len(set(sizes_of(tensors, count))) > 1 else None


def microbatches(tensors: Sequence[torch.Tensor], tree: Tree, count: int) -> list[list[torch.Tensor]]:
    """`count` parts of the inputs of a step, along dim 0, the first ones a sample larger where the batch does not
    divide: the batch is the size of dim 0 of the first input that has one, and inputs of another size are given whole
    to each. RequestError where there are fewer samples than parts."""
    split, sizes = splits(tensors), sizes_of(tensors, count)
    if not all(sizes):
        name = next(name for name, cut in zip(tree.names, split, strict=True) if cut)
        raise RequestError(
            f"'microbatches' must be at most the samples of the batch, got {count} for {sum(sizes)} (dim 0 of {name}); "
            f"plan with {sum(sizes)} or fewer, or give a larger batch"
        )
    parts = [t.split(sizes) if cut else (t,) * count for t, cut in zip(tensors, split, strict=True)]
    return [[part[index] for part in parts] for index in range(count)]


def samples_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Samples in the inputs of a step; 1 where nothing is cut."""
    tensors, _ = flatten_call(args, kwargs)
    return sum(sizes_of(tensors, 1))


def first_rows(args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> tuple[tuple, dict[str, Any]]:
    """The inputs of the first `rows` samples."""
    tensors, tree = flatten_call(args, kwargs)
    return tree.build([t[:rows] if cut else t for t, cut in zip(tensors, splits(tensors), strict=True)])


def splits(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which inputs are cut along dim 0."""
    batch = next((t.shape[0] for t in tensors if t.dim()), None)
    return [t.dim() > 0 and t.shape[0] == batch for t in tensors]


def sizes_of(tensors: Sequence[torch.Tensor], count: int) -> list[int]:
    """Samples of each of `count` micro-batches: as even as can be, the larger first; one each where nothing is cut."""
    batch = next((t.shape[0] for t, cut in zip(tensors, splits(tensors), strict=True) if cut), count)
    return [batch // count + (index < batch % count) for index in range(count)]


def weights(tensors: Sequence[torch.Tensor], count: int) -> list[float]:
    """What the mean of each micro-batch counts for in the mean over the batch."""
    sizes = sizes_of(tensors, count)
    return [size / sum(sizes) for size in sizes]

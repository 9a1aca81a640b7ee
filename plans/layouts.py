"""Layouts: where the pieces of a tensor lie on a mesh, one placement per axis.

A placement is its text form, as DTensor prints it, so that equality, hashing and JSON need no code:

    R          every device along the axis holds the whole tensor
    S(d)       split along tensor dim d, chunk by chunk as torch.chunk does (the last chunks may be smaller or empty)
    P(sum)     every device holds a term; the tensor is their sum
    P(max)     likewise with the maximum;  P(min) with the minimum

A layout is a tuple of placements. When two axes split one dim, the earlier axis splits first and the later axis
splits each chunk again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import RequestError

__all__ = [
    "Layout",
    "PARTIAL",
    "Placement",
    "REPLICATE",
    "chunk_sizes",
    "is_partial",
    "local_range",
    "local_shape",
    "parse_layout",
    "parse_placement",
    "pieces",
    "shard",
    "shard_dim",
]

Placement = str
Layout = tuple[str, ...]

REPLICATE: Placement = "R"
PARTIAL: Placement = "P(sum)"
_FORM = re.compile(r"R|S\((\d{1,2})\)|P\((sum|max|min)\)")


def shard(dim: int) -> Placement:
    """The placement that splits tensor dim `dim`."""
    return f"S({dim})"


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that `placement` splits, or None."""
    return int(placement[2:-1]) if placement[0] == "S" else None


def is_partial(placement: Placement) -> bool:
    """Whether `placement` leaves a reduction pending."""
    return placement[0] == "P"


def parse_placement(text: object) -> Placement:
    """`text` itself when it is a placement; RequestError otherwise."""
    if not isinstance(text, str) or not _FORM.fullmatch(text):
        raise RequestError(f"'placement' must be R, S(dim), P(sum), P(max) or P(min), got {text!r}")
    return text


def parse_layout(value: object, axes: int) -> Layout:
    """A layout from 'S(0),R' or ['S(0)', 'R']; it must have one placement per mesh axis."""
    parts = value.replace(" ", "").split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise RequestError(f"'layout' must be a list of placements, got {value!r}")
    layout = tuple(parse_placement(part) for part in parts)
    if len(layout) != axes:
        raise RequestError(f"'layout' must have one placement for each of the {axes} mesh axes, got {value!r}")
    return layout


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Sizes of the pieces of `size` elements over `parts` devices, as torch.chunk and DTensor cut them."""
    full = -(-size // parts)
    return tuple(max(0, min(full, size - index * full)) for index in range(parts))


def pieces(size: int, dim: int, layout: Layout, mesh: Sequence[int]) -> list[int]:
    """Sizes of the pieces along tensor dim `dim` of global size `size`, in order; one where no axis splits it."""
    lengths = [size]
    for placement, parts in zip(layout, mesh, strict=True):
        if shard_dim(placement) == dim:
            lengths = [piece for length in lengths for piece in chunk_sizes(length, parts)]
    return lengths


def local_range(size: int, dim: int, layout: Layout, mesh: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """Offset and length, along tensor dim `dim` of global size `size`, of the piece at mesh position `coordinate`."""
    offset, length = 0, size
    for placement, parts, index in zip(layout, mesh, coordinate, strict=True):
        if shard_dim(placement) == dim:
            full = -(-length // parts)
            before = min(length, index * full)
            offset, length = offset + before, min(full, length - before)
    return offset, length


def local_shape(
    shape: Sequence[int], layout: Layout, mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the piece of a tensor of global `shape` at mesh position `coordinate`."""
    return tuple(local_range(size, dim, layout, mesh, coordinate)[1] for dim, size in enumerate(shape))

"""How numbers and layouts are put to a person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .layouts import Layout, Placement, shard_dim
from .meshes import Mesh

if TYPE_CHECKING:
    from .pipelines import Pipeline

__all__ = [
    "axis_words",
    "bytes_words",
    "dtype_bytes",
    "layout_words",
    "moved_words",
    "pattern_of",
    "pipeline_words",
    "placement_words",
    "seconds_words",
    "shape_words",
]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def seconds_words(value: float) -> str:
    """A time with three digits and a fitting unit: '1.23 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return "0 s" if value == 0 else f"{value:.3g} s"


def bytes_words(value: float) -> str:
    """A size with a binary unit: '12.3 GiB'."""
    for unit, size in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype that torch names: 'bfloat16' is 2, 'bool' is 1."""
    match = re.search(r"\d+", dtype)
    return max(1, int(match.group()[:4]) // 8) if match else 1


def shape_words(shape: Sequence[int]) -> str:
    """A shape: '4096 x 1024', or 'scalar'."""
    return " x ".join(str(n) for n in shape) or "scalar"


def placement_words(placement: Placement) -> str:
    """One placement in words: 'whole', 'split on dim 0', 'partial sum'."""
    dim = shard_dim(placement)
    if dim is not None:
        return f"split on dim {dim}"
    return "whole" if placement == "R" else f"partial {placement[2:-1]}"


def axis_words(mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes with their sizes: ('dp=8', 'tp=8')."""
    return tuple(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))


def layout_words(layout: Layout | None, mesh: Mesh) -> str:
    """A layout in words: 'split on dim 0 over dp, whole on tp'."""
    if layout is None:
        return "not a tensor"
    if all(placement == "R" for placement in layout):
        return "whole everywhere"
    return ", ".join(
        f"{placement_words(placement)} {'on' if placement == 'R' else 'over'} {name}"
        for placement, name in zip(layout, mesh.axis_names, strict=False)
    )


def moved_words(before: Layout, after: Layout, mesh: Mesh) -> str:
    """What is different between two layouts on one mesh: 'split on dim 0 -> whole on tp'."""
    pairs = zip(before, after, mesh.axis_names, strict=True)
    return ", ".join(f"{placement_words(a)} -> {placement_words(b)} on {name}" for a, b, name in pairs if a != b)


def pattern_of(name: str) -> str:
    """`name` with every part that is a number replaced by `*`."""
    return _NUMBER.sub("*", name)


def pipeline_words(pipeline: Pipeline) -> str:
    """How many ranks, stages and micro-batches there are, and how long the ranks idle."""
    idle = pipeline.bubble_fraction
    bubble = "" if idle is None else f", ranks idle {100 * idle:.1f}% of the time"
    return (
        f"{pipeline.ranks} ranks with a mesh each, {len(pipeline.stages)} stages, {pipeline.microbatches} "
        f"micro-batches{bubble}"
    )

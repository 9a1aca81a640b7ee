"""The parts in which a value goes from the devices of one stage to those of another.

Where both stages lie alike each device hands its piece to the one at its own coordinate. Between different meshes the
receiver's piece comes in parts, each from a device that holds it (see plans/handover.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..plans.handover import handed_over
from ..plans.layouts import Layout, local_range
from ..plans.meshes import Mesh
from ..plans.migration import Box

__all__ = ["Part", "given_parts", "part_of", "put_part", "taken_parts", "whole_part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What goes to, or comes from, device `index` of the other stage: the elements of `box`, counted from the beginning
    of this device's own piece; None for the piece itself."""

    index: int
    box: Box | None


def whole_part(mesh: Mesh, coordinate: Sequence[int]) -> tuple[Part, ...]:
    """The piece as it is, between devices at the same coordinate."""
    return (Part(index=mesh.rank(tuple(coordinate)), box=None),)


def given_parts(
    value: torch.Tensor, before: tuple[Layout, Mesh], after: tuple[Layout, Mesh], coordinate: Sequence[int]
) -> tuple[Part, ...]:
    """What the device at `coordinate` of the mesh in `before` gives of the global tensor `value`."""
    layout, mesh = before
    me = mesh.rank(tuple(coordinate))
    return tuple(
        Part(index=one.taker, box=_within(one.box, value.shape, layout, mesh, coordinate))
        for one in handed_over(value.shape, _dtype(value), before, after)
        if one.giver == me
    )


def taken_parts(
    value: torch.Tensor, before: tuple[Layout, Mesh], after: tuple[Layout, Mesh], coordinate: Sequence[int]
) -> tuple[Part, ...]:
    """What the device at `coordinate` of the mesh in `after` is given of the global tensor `value`."""
    layout, mesh = after
    me = mesh.rank(tuple(coordinate))
    return tuple(
        Part(index=one.giver, box=_within(one.box, value.shape, layout, mesh, coordinate))
        for one in handed_over(value.shape, _dtype(value), before, after)
        if one.taker == me
    )


def part_of(piece: torch.Tensor, part: Part) -> torch.Tensor:
    """The elements of a part, a view of `piece`."""
    for dim, (start, length) in enumerate(part.box or ()):
        piece = piece.narrow(dim, start, length)
    return piece


def put_part(piece: torch.Tensor, part: Part, data: torch.Tensor) -> None:
    """Write a part to its place in `piece`."""
    part_of(piece, part).copy_(data)


def _within(box: Box, shape: Sequence[int], layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> Box:
    """`box` counted from the beginning of the piece at `coordinate`."""
    starts = [local_range(n, dim, layout, mesh.shape, coordinate)[0] for dim, n in enumerate(shape)]
    return tuple((start - first, length) for (start, length), first in zip(box, starts, strict=True))


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")

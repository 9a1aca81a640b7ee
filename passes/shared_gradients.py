"""Gradients of parameters that several pipeline ranks hold, added up: all copies stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..plans.layouts import Layout
from ..plans.meshes import Mesh
from .channels import Channels
from .handover import given_parts, taken_parts
from .stage_work import Expected

__all__ = ["sum_at_first"]


def sum_at_first(
    name: str,
    part: torch.Tensor,
    whole: torch.Tensor,
    places: Mapping[int, tuple[Layout, Mesh]],
    channels: Channels,
    coordinate: Sequence[int],
) -> torch.Tensor:
    """The sum of a gradient over the pipeline ranks in `places`, which hold it in these layouts on different meshes, as
    it lies here. `part` is this rank's piece, `whole` is as the whole gradient, whose values are not read.

    The first of the ranks adds up what the others send it, in their order, and gives each its piece: sums are equal to
    the last bit on all. Called by all devices of all these ranks, for the same parameters in the same order.
    """
    first, *others = sorted(places)
    me = channels.rank
    here = places[me]

    def expected(other: int) -> Expected:
        parts = taken_parts(whole, places[other], here, coordinate)
        return Expected(name=name, shape=tuple(part.shape), dtype=part.dtype, parts=parts)

    if me != first:
        channels.send([part], [given_parts(whole, here, places[first], coordinate)], first)
        return channels.receive([expected(first)], first).wait()[0]
    for other in others:
        part = part + channels.receive([expected(other)], other).wait()[0]
    for other in others:
        channels.send([part], [given_parts(whole, here, places[other], coordinate)], other)
    return part

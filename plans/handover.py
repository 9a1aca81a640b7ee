"""What is handed over between two meshes: which device gives which piece of a tensor to which.

Every device of the receiving mesh gets exactly the piece that its layout says, in as few parts as the giving layout
allows. Where several devices hold a part, the one gives it that has given least. Equal arguments give equal parts in
the same order, so both sides work them out for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layouts import Layout
from .meshes import Mesh
from .migration import Box, Carried, Place, migrate

__all__ = ["Handed", "handed_over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """The elements of `box`, of the global tensor, go from device `giver` of one mesh to device `taker` of another."""

    giver: int
    taker: int
    box: Box


def handed_over(
    shape: Sequence[int], dtype: str, before: tuple[Layout, Mesh], after: tuple[Layout, Mesh]
) -> tuple[Handed, ...]:
    """The parts of a tensor of `shape` (elements) that lies as `before` says and is to lie as `after` says, on other
    devices. RequestError for a layout in which a sum is pending."""
    (here, grid), (there, other) = before, after
    giving, taking = tuple(range(grid.size)), tuple(range(grid.size, grid.size + other.size))
    carried = Carried(
        name="value",
        shape=tuple(shape),
        dtype=dtype,
        before=Place(layout=here, mesh=grid, ranks=giving),
        after=Place(layout=there, mesh=other, ranks=taking),
    )
    moves = migrate([carried], (*giving, *taking)).moves
    return tuple(Handed(giver=m.donor, taker=m.receiver - grid.size, box=m.box) for m in moves)

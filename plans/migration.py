"""A migration: which bytes of parameters and optimizer state move from which rank to which when a plan takes over.

Ranks are numbers that stay with a process for its life, not positions on a mesh: a `Place` says who stood or will stand
at each position. Nothing is sent that its receiver already holds. Where several living ranks hold the same piece, the
nearest gives it, and among those the one that gives least so far. What no living rank holds is `missing` and must come
from a checkpoint. Equal arguments give equal migrations, so survivors that each compute one agree.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from .errors import RequestError
from .layouts import REPLICATE, Layout, is_partial, local_range, local_shape
from .meshes import Mesh
from .plan import Plan, Tensor
from .stage_holders import stage_holders
from .stamps import stamped_block
from .words import dtype_bytes

__all__ = ["Box", "Carried", "Migration", "Missing", "Move", "Place", "Places", "carried", "cells_of", "migrate"]

# Start and length along each tensor dim, in elements of the global tensor; () is the one element of a scalar.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the pieces of a tensor lie: position i of `mesh`, in its row-major order, is taken by rank `ranks[i]`."""

    layout: Layout
    mesh: Mesh
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.mesh.size or len(set(self.ranks)) != len(self.ranks):
            raise RequestError(
                f"'ranks' must be one rank for each of the {self.mesh.size} positions of mesh {self.mesh}, "
                f"got {self.ranks}"
            )
        if len(self.layout) != self.mesh.ndim or any(is_partial(p) for p in self.layout):
            raise RequestError(
                f"'layout' must have a whole or split placement for each axis of mesh {self.mesh}, got {self.layout}"
            )

    @classmethod
    def in_stages(cls, layout: Layout, mesh: Mesh, ranks: Sequence[int], stages: Sequence[int]) -> Place:
        """Alike on each of the pipeline ranks `stages`; pipeline rank r is played by as many of `ranks` as `mesh` has,
        from r times that number on."""
        size = mesh.size
        held = tuple(ranks[stage * size + at] for stage in stages for at in range(size))
        whole = Mesh((len(stages), *mesh.shape), ("pipeline", *mesh.axis_names))
        return cls(layout=(REPLICATE, *layout), mesh=whole, ranks=held)

    def box(self, shape: Sequence[int], rank: int) -> Box | None:
        """The piece of a tensor of `shape` that `rank` holds; None when it holds no element."""
        if rank not in self.ranks:
            return None
        return self._box(shape, self.mesh.coordinate(self.ranks.index(rank)))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the piece of a tensor of `shape` that `rank`, one of `ranks`, holds; it may be empty."""
        return local_shape(shape, self.layout, self.mesh.shape, self.mesh.coordinate(self.ranks.index(rank)))

    def boxes(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """Every rank that holds some of a tensor of `shape`, and its piece."""
        for rank, coordinate in zip(self.ranks, self.mesh.coordinates(), strict=True):
            box = self._box(shape, coordinate)
            if box is not None:
                yield rank, box

    def _box(self, shape: Sequence[int], coordinate: tuple[int, ...]) -> Box | None:
        box = tuple(local_range(n, d, self.layout, self.mesh.shape, coordinate) for d, n in enumerate(shape))
        return box if all(length for _, length in box) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the pieces of a tensor lie that each of several replicas holds whole, split in its own way."""

    parts: tuple[Place, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everybody who holds a piece."""
        return tuple(rank for part in self.parts for rank in part.ranks)

    def box(self, shape: Sequence[int], rank: int) -> Box | None:
        """As `Place.box`."""
        return next((part.box(shape, rank) for part in self.parts if rank in part.ranks), None)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """As `Place.local_shape`."""
        return next(part.local_shape(shape, rank) for part in self.parts if rank in part.ranks)

    def boxes(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """As `Place.boxes`."""
        for part in self.parts:
            yield from part.boxes(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A tensor that outlives a change of plan. `copies` equal tensors may go under one name, as in a plan's blocks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    before: Place | Places
    after: Place | Places
    copies: int = 1


class Move(Struct, frozen=True, kw_only=True):
    """A piece that `receiver` will hold and `donor` holds; when they are one, it is kept. `size_bytes` is of all
    copies."""

    name: str
    box: Box
    donor: int
    receiver: int
    size_bytes: int


class Missing(Struct, frozen=True, kw_only=True):
    """A piece that `receiver` should hold and no living rank holds."""

    name: str
    box: Box
    receiver: int
    size_bytes: int


class Migration(Struct, frozen=True, kw_only=True):
    """What every rank sends, keeps and receives; moves are in the order in which they should be made."""

    moves: tuple[Move, ...]
    missing: tuple[Missing, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross from one rank to another."""
        return sum(move.size_bytes for move in self.moves if move.donor != move.receiver)

    @property
    def kept_bytes(self) -> int:
        """Bytes that a rank needs and already holds."""
        return sum(move.size_bytes for move in self.moves if move.donor == move.receiver)

    @property
    def missing_bytes(self) -> int:
        """Bytes that no living rank holds, counted once per rank that needs them."""
        return sum(piece.size_bytes for piece in self.missing)

    def between(self) -> dict[tuple[int, int], int]:
        """Bytes from each donor to each receiver, of those that move."""
        found: dict[tuple[int, int], int] = {}
        for move in self.moves:
            if move.donor != move.receiver:
                key = move.donor, move.receiver
                found[key] = found.get(key, 0) + move.size_bytes
        return found

    def digest(self) -> str:
        """A sha256 by which ranks see that they mean the same migration."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def migrate(
    tensors: Iterable[Carried], alive: Collection[int], *, apart: Callable[[int, int], int] | None = None
) -> Migration:
    """What has to move so that every tensor lies where its `after` says, from the living ranks among `before`.

    `apart(donor, receiver)` tells how far two ranks are from each other (0: the nearest); without it all are as near.
    RequestError when a receiver is not alive.
    """
    living = frozenset(alive)
    given: dict[int, int] = dict.fromkeys(living, 0)
    grids: dict[tuple[tuple[int, ...], Place | Places], _Grid] = {}
    routes: dict[tuple[tuple[int, ...], Place | Places, Place | Places], list[_Route]] = {}
    moves: list[Move] = []
    missing: list[Missing] = []
    for tensor in tensors:
        gone = sorted(set(tensor.after.ranks) - living)
        if gone:
            raise RequestError(f"'after' must be ranks that are alive, got {gone} for {tensor.name}")
        start, end = (tensor.shape, tensor.before), (tensor.shape, tensor.before, tensor.after)
        if end not in routes:
            grid = grids[start] if start in grids else grids.setdefault(start, _Grid(*start, living))
            routes[end] = list(grid.routes(tensor.after))
        element = dtype_bytes(tensor.dtype) * tensor.copies
        for receiver, box, count, holders in routes[end]:
            size = element * count
            if not holders:
                missing.append(Missing(name=tensor.name, box=box, receiver=receiver, size_bytes=size))
                continue
            donor = receiver if receiver in holders else _nearest(holders, receiver, given, apart)
            if donor != receiver:
                given[donor] += size
            moves.append(Move(name=tensor.name, box=box, donor=donor, receiver=receiver, size_bytes=size))
    return Migration(moves=tuple(moves), missing=tuple(missing))


# A receiver, a box that it needs, its elements, and the living ranks that hold it.
_Route = tuple[int, Box, int, list[int]]


def cells_of(shape: Sequence[int], place: Place | Places) -> tuple[dict[Box, list[int]], list[list[tuple[int, int]]]]:
    """The least boxes of a tensor of `shape` that are held alike, each with the ranks that hold it, and the intervals
    per dim of which they are the product: pieces of unlike replicas are cut where any of them ends."""
    held = list(place.boxes(shape))
    intervals = []
    for dim in range(len(shape)):
        cuts = sorted({end for _, box in held for end in (box[dim][0], box[dim][0] + box[dim][1])})
        intervals.append([(low, high - low) for low, high in itertools.pairwise(cuts)])
    starts = [[start for start, _ in row] for row in intervals]
    found: dict[Box, list[int]] = {}
    inside: dict[Box, list[Box]] = {}
    for rank, box in held:
        if box not in inside:
            inside[box] = list(_product(box, intervals, starts))
        for cell in inside[box]:
            found.setdefault(cell, []).append(rank)
    return found, intervals


def _product(box: Box, intervals: list[list[tuple[int, int]]], starts: list[list[int]]) -> Iterator[Box]:
    """The cells that a box touches."""
    touched = []
    for (start, length), row, firsts in zip(box, intervals, starts, strict=True):
        touched.append(row[bisect_right(firsts, start) - 1 : bisect_right(firsts, start + length - 1)])
    return itertools.product(*touched)


class _Grid:
    """The pieces of a tensor before the change and who holds each. Pieces are the product of intervals per dim."""

    def __init__(self, shape: tuple[int, ...], place: Place | Places, alive: frozenset[int]) -> None:
        self.shape = shape
        cells, self.intervals = cells_of(shape, place)
        self.holders = {box: [rank for rank in ranks if rank in alive] for box, ranks in cells.items()}
        self.starts = [[start for start, _ in intervals] for intervals in self.intervals]

    def routes(self, after: Place | Places) -> Iterator[_Route]:
        """For every rank of `after` the parts of its piece, each with the living ranks that hold it."""
        for receiver, target in after.boxes(self.shape):
            for source in _product(target, self.intervals, self.starts):
                box = _common(source, target)
                yield receiver, box, math.prod(length for _, length in box), self.holders[source]


def _common(left: Box, right: Box) -> Box:
    """The elements of two boxes that meet."""
    found = []
    for (a, m), (b, n) in zip(left, right, strict=True):
        start = max(a, b)
        found.append((start, min(a + m, b + n) - start))
    return tuple(found)


def _nearest(
    holders: Sequence[int], receiver: int, given: Mapping[int, int], apart: Callable[[int, int], int] | None
) -> int:
    return min(holders, key=lambda rank: (0 if apart is None else apart(rank, receiver), given[rank], rank))


def carried(
    before: Plan,
    after: Plan,
    ranks_before: Sequence[int],
    ranks_after: Sequence[int],
    *,
    states: Sequence[str] = ("exp_avg", "exp_avg_sq"),
) -> Iterator[Carried]:
    """The tensors that a change from plan `before` to `after` carries over: parameters, optimizer `states` of the same
    shape (named parameter::state), buffers. Equal blocks stay together where both plans have them together.

    RequestError when the plans are not for the same tensors.
    """
    for plan in (before, after):
        plan.one_mesh("migrated")
    piped = before.pipeline is not None or after.pipeline is not None
    places_before, places_after = _places(before, ranks_before), _places(after, ranks_after)
    for field in ("parameters", "buffers"):
        old: tuple[Tensor, ...] = getattr(before, field)
        new: tuple[Tensor, ...] = getattr(after, field)
        # Of equal blocks in a pipeline one lies here and one there.
        together = (
            not piped and {t.name for t in old} == {t.name for t in new} and before.model.blocks == after.model.blocks
        )
        left, right = (
            {t.name: t for t in tensors} if together else _numbered(plan, tensors)
            for plan, tensors in ((before, old), (after, new))
        )
        other = set(left) ^ set(right)
        if other or any((left[n].shape, left[n].dtype) != (right[n].shape, right[n].dtype) for n in left):
            raise RequestError(
                f"'plans' must be for the same {field}, got others, e.g. {min(other, default='another shape')}; "
                "plan again for the same model"
            )
        for name, tensor in left.items():
            here, there = places_before(name, tensor.layout), places_after(name, right[name].layout)
            copies = before.copies(name) if together else 1
            for state in ("", *(states if field == "parameters" else ())):
                label = f"{name}::{state}" if state else name
                yield Carried(
                    name=label, shape=tensor.shape, dtype=tensor.dtype, before=here, after=there, copies=copies
                )


def _places(plan: Plan, ranks: Sequence[int]) -> Callable[[str, Layout], Place]:
    """Where a tensor of `plan` with a layout lies, by its name."""
    if plan.pipeline is None:
        return lambda name, layout: Place(layout=layout, mesh=plan.mesh, ranks=tuple(ranks))
    holders, everywhere = stage_holders(plan), range(plan.pipeline.ranks)
    return lambda name, layout: Place.in_stages(layout, plan.mesh, ranks, holders.get(name, everywhere))


def _numbered(plan: Plan, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors by name, those of equal blocks one by one; an entry with a number of its own goes before its block's."""
    stamps = {stamp.pattern: stamp for stamp in plan.model.stamps()}
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        stamp = stamps.get(stamped_block(tensor.name, stamps) or "")
        for name in [tensor.name] if stamp is None else stamp.names(tensor.name):
            if name not in found or stamp is None:
                found[name] = tensor
    return found

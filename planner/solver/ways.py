"""Costs of a pair that come from moving one tensor, without writing out the matrix of all pairs of choices.

On four axes a tensor has a thousand layouts and an op thousands of strategies; all pairs of them would fill gigabytes.
What a search needs is the least over one side, and that follows from the single steps between layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["WRITTEN_OUT", "Grid", "Moved", "Way"]

# Most pairs of choices whose costs are held as a matrix.
WRITTEN_OUT = 150_000
# Entries of one batch of relaxations.
_BATCH = 1 << 20
Arcs = Sequence[tuple[int, int, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Layouts as cells of a grid with one side per mesh axis; `steps[k]` [before, old, new, after] are the seconds of
    changing the placement on axis k, inf where there is no such step or no such layout."""

    sides: tuple[int, ...]
    cells: np.ndarray
    steps: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, layouts: Sequence[Sequence[str]], arcs: Arcs) -> Grid:
        """From layouts and the single steps between them as (before, after, seconds)."""
        names = [sorted(set(column)) for column in zip(*layouts, strict=True)]
        sides = tuple(map(len, names))
        places = np.array(
            [[names[k].index(p) for k, p in enumerate(layout)] for layout in layouts], dtype=np.int64
        ).reshape(len(layouts), len(sides))
        cells = np.ravel_multi_index(tuple(places.T), sides)
        steps = []
        for axis, side in enumerate(sides):
            before, after = math.prod(sides[:axis]), math.prod(sides[axis + 1 :])
            table = np.full((before, side, side, after), np.inf)
            table[:, range(side), range(side), :] = 0.0
            steps.append(table)
        for start, end, seconds in arcs:
            axis = int(np.flatnonzero(places[start] != places[end])[0])
            after = math.prod(sides[axis + 1 :])
            rest = int(cells[start]) % after
            lead = int(cells[start]) // (after * sides[axis])
            steps[axis][lead, places[start, axis], places[end, axis], rest] = seconds
        return cls(sides=sides, cells=cells, steps=tuple(steps))

    def least(self, lines: np.ndarray, *, back: bool = False) -> np.ndarray:
        """For lines [many, layouts]: the least of line[a] + seconds from a to b over a, per b; `back`: from b to a."""
        held = np.full((len(lines), math.prod(self.sides)), np.inf)
        held[:, self.cells] = lines
        while True:
            before = held
            for steps in self.steps if not back else reversed(self.steps):
                lead, side, _, after = steps.shape
                cells = held.reshape(len(lines), lead, side, after)
                moved = cells[:, :, None, :, :] if back else cells[:, :, :, None, :]
                held = (moved + steps).min(axis=3 if back else 2).reshape(held.shape)
            if np.array_equal(held, before):
                return held[:, self.cells]


class Table(Protocol):
    """What a way needs of a transition table."""

    @property
    def grid(self) -> Grid:
        """Single steps."""
        ...

    @property
    def seconds(self) -> np.ndarray:
        """All pairs of layouts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """The costs [choice of one, choice of other] of moving a tensor from where the one has it to where the other wants
    it: `weight` times the seconds from layout rows[i] to columns[j]; `back`: from columns[j] to rows[i]."""

    table: Table
    rows: np.ndarray
    columns: np.ndarray
    weight: float
    back: bool = False

    @property
    def grid(self) -> Grid:
        """Single steps between the layouts."""
        return self.table.grid

    @property
    def shape(self) -> tuple[int, int]:
        """As that of a matrix."""
        return len(self.rows), len(self.columns)

    @property
    def size(self) -> int:
        """As that of a matrix."""
        return len(self.rows) * len(self.columns)

    @property
    def most(self) -> float:
        """At least any finite cost: a cheapest way takes no layout twice."""
        largest = max(float(np.where(np.isfinite(steps), steps, 0.0).max()) for steps in self.grid.steps)
        return largest * len(self.grid.cells) * self.weight

    @property
    def T(self) -> Way:  # noqa: N802
        """The same from the other side."""
        return Way(table=self.table, rows=self.columns, columns=self.rows, weight=self.weight, back=not self.back)

    def least(self, line: np.ndarray) -> np.ndarray:
        """Least of line[i] + costs[i, j] over i, per j."""
        held = np.full(len(self.grid.cells), np.inf)
        np.minimum.at(held, self.rows, line / self.weight)
        return self.grid.least(held[None, :], back=self.back)[0][self.columns] * self.weight

    def __getitem__(self, at: int | tuple[int, int]) -> np.ndarray:
        """A row, or one entry."""
        row, column = at if isinstance(at, tuple) else (at, slice(None))
        held = np.full((1, len(self.grid.cells)), np.inf)
        held[0, self.rows[row]] = 0.0
        return self.grid.least(held, back=self.back)[0][self.columns[column]] * self.weight

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """The matrix."""
        starts, place = np.unique(self.rows, return_inverse=True)
        if 2 * len(starts) > len(self.grid.cells):
            seconds = self.table.seconds.T if self.back else self.table.seconds
            return seconds[np.ix_(self.rows, self.columns)] * self.weight
        found = np.empty((len(starts), len(self.columns)))
        stride = max(1, _BATCH // math.prod(self.grid.sides))
        for first in range(0, len(starts), stride):
            some = starts[first : first + stride]
            held = np.full((len(some), len(self.grid.cells)), np.inf)
            held[np.arange(len(some)), some] = 0.0
            found[first : first + stride] = self.grid.least(held, back=self.back)[:, self.columns]
        return found[place] * self.weight

    def restricted(self, rows: np.ndarray, columns: np.ndarray) -> Way:
        """The costs between some choices only."""
        return Way(
            table=self.table, rows=self.rows[rows], columns=self.columns[columns], weight=self.weight, back=self.back
        )

    def content(self) -> bytes:
        """What decides the costs."""
        numbers = (self.rows, self.columns, np.array([self.weight, self.back]), self.grid.cells, *self.grid.steps)
        return b"".join(np.ascontiguousarray(part, dtype=np.float64).tobytes() for part in numbers)

    def partnered(self, alive: np.ndarray) -> np.ndarray:
        """Which of the others have a way from one that is alive."""
        return np.isfinite(self.least(np.where(alive, 0.0, np.inf)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moved:
    """The bytes of a copy [choice of one, choice of other]: bytes[j] where rows[i] differs from columns[j], else none;
    with `flipped` [choice of other, choice of one]."""

    rows: np.ndarray
    columns: np.ndarray
    bytes: np.ndarray
    flipped: bool = False

    def __getitem__(self, at: tuple[int, ...]) -> float:
        """One entry."""
        i, j = at[::-1] if self.flipped else at
        return 0.0 if self.rows[i] == self.columns[j] else float(self.bytes[j])

    def content(self) -> bytes:
        """What decides the bytes."""
        numbers = (self.rows, self.columns, self.bytes, np.array([self.flipped]))
        return b"".join(np.ascontiguousarray(part, dtype=np.float64).tobytes() for part in numbers)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """The matrix."""
        found = np.where(self.rows[:, None] == self.columns[None, :], 0.0, self.bytes[None, :])
        return found.T if self.flipped else found

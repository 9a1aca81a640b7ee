"""Transitions: the cheapest way from any layout of a tensor to any other, in steps along one mesh axis each.

The layouts of a tensor are the states of a graph whose arcs are single steps; all cheapest ways are found at once
and kept per tensor shape. A step on a dim must not pass a later axis that splits the same dim,
because that axis cut the pieces of this one."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...plans.layouts import PARTIAL, REPLICATE, Layout, is_partial, local_shape, shard, shard_dim
from ...plans.meshes import Mesh
from ..solver.ways import Grid
from .strategies import shardable, split_dims

__all__ = ["STEP_S", "TransitionTable", "Transitions", "step_between"]

# Per state the states that a single step leads to, with its text and seconds.
Steps = dict[int, dict[int, tuple[str, float]]]
# Breaks ties towards fewer steps; far below the latency of any collective.
STEP_S = 1e-9


@dataclass(slots=True, kw_only=True, eq=False)
class TransitionTable:
    """All layouts of one tensor shape.

    seconds[i, j] is the time of the cheapest way from state i to state j (inf: none), steps[i][j] the text and seconds
    of a single step, local[i, d] the largest local size of dim d in state i, bytes[i] the largest local bytes."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    local: np.ndarray
    bytes: np.ndarray
    steps: Steps
    _seconds: np.ndarray | None = None
    _grid: Grid | None = None

    @property
    def seconds(self) -> np.ndarray:
        """All pairs, worked out when first asked for."""
        if self._seconds is None:
            self._seconds = _shortest(len(self.layouts), self.steps)
        return self._seconds

    @property
    def grid(self) -> Grid:
        """The same as single steps on a grid."""
        if self._grid is None:
            arcs = [(i, j, time) for i, found in self.steps.items() for j, (_, time) in found.items()]
            self._grid = Grid.of(self.layouts, arcs)
        return self._grid

    def _to(self, end: int) -> np.ndarray:
        """Seconds to one state from all."""
        if self._seconds is not None:
            return self._seconds[:, end]
        held = np.full((1, len(self.layouts)), np.inf)
        held[0, end] = 0.0
        return self.grid.least(held, back=True)[0]

    def way(self, source: Layout, target: Layout) -> tuple[str, ...]:
        """The steps of the cheapest way, as texts."""
        at, end = self.index[source], self.index[target]
        found, left = [], self._to(end)
        while at != end:
            # Every step takes time, so the next state lies nearer to the end.
            after = min(self.steps[at], key=lambda state: self.steps[at][state][1] + left[state])
            found.append(self.steps[at][after][0])
            at = after
        return tuple(found)

    def time(self, source: Layout, target: Layout) -> float:
        """Seconds of the cheapest way."""
        return float(self._to(self.index[target])[self.index[source]])


class Transitions:
    """Transition tables of one planning run, one per tensor shape and item size. `prices` is cost_models.Prices or
    alike; tensors of the shapes in `wide` may lie in every layout that there is."""

    def __init__(self, mesh: Mesh, prices: object, *, wide: Collection[tuple[int, ...]] = frozenset()) -> None:
        self.mesh, self.prices, self.wide = mesh, prices, wide
        self._tables: dict[tuple, TransitionTable] = {}

    def table(self, shape: Sequence[int], itemsize: int, *, extremes: bool = False) -> TransitionTable:
        """The table of a tensor of `shape` (elements) with `itemsize` bytes per element; `extremes` adds P(max),
        P(min)."""
        key = (tuple(shape), itemsize, extremes)
        if key not in self._tables:
            self._tables[key] = self._build(*key)
        return self._tables[key]

    def _build(self, shape: tuple[int, ...], itemsize: int, extremes: bool) -> TransitionTable:
        mesh, wide = self.mesh.shape, shape in self.wide
        one = [
            REPLICATE,
            *(shard(d) for d in split_dims(shape, wide=wide)),
            PARTIAL,
            *(["P(max)", "P(min)"] if extremes else []),
        ]
        layouts = tuple(
            layout
            for layout in itertools.product(*[one if n > 1 else [REPLICATE] for n in mesh])
            if len({p for p in layout if is_partial(p)}) < 2 and shardable(shape, layout, mesh, wide=wide)
        )
        index = {layout: i for i, layout in enumerate(layouts)}
        local = np.array(
            [local_shape(shape, layout, mesh, (0,) * len(mesh)) for layout in layouts], dtype=np.int64
        ).reshape(len(layouts), len(shape))
        sizes = local.prod(axis=1, dtype=np.float64) * itemsize if shape else np.full(len(layouts), float(itemsize))
        steps = self._arcs(layouts, index, sizes)
        return TransitionTable(layouts=layouts, index=index, local=local, bytes=sizes, steps=steps)

    def _arcs(self, layouts: Sequence[Layout], index: dict[Layout, int], sizes: np.ndarray) -> Steps:
        """All single steps by state, with text and seconds."""
        steps: Steps = {i: {} for i in range(len(layouts))}
        batches: dict[tuple[str, int], list[_Arc]] = {}
        placements = [sorted({layout[axis] for layout in layouts}) for axis in range(len(self.mesh.shape))]
        for i, layout in enumerate(layouts):
            for axis, parts in enumerate(self.mesh.shape):
                if parts == 1:
                    continue
                for new in placements[axis]:
                    j = index.get((*layout[:axis], new, *layout[axis + 1 :]))
                    if j is None or j == i or not _clear(layout, new, axis):
                        continue
                    kind, text, copies = step_between(layout[axis], new, self.mesh.axis_names[axis])
                    if kind is not None:
                        larger = float(max(sizes[i], sizes[j]))
                        batches.setdefault((kind, axis), []).append(_Arc(i, j, text, larger, copies))
        for (kind, axis), rows in batches.items():
            for arc, time in zip(rows, self._times(kind, axis, rows).tolist(), strict=True):
                steps[arc.start][arc.end] = (arc.text, time)
        return steps

    def _times(self, kind: str, axis: int, rows: Sequence[_Arc]) -> np.ndarray:
        """Seconds of steps of one kind along one axis."""
        sizes = np.array([arc.bytes for arc in rows])
        # The whole buffer of the group; copies are passes over local memory to bring dim `d` to the front.
        whole = sizes * (self.mesh.shape[axis] if kind == "all_to_all" else 1)
        copied = sizes * np.array([arc.copies for arc in rows])
        times = np.full(len(rows), STEP_S)
        if kind not in ("slice", "keep_first"):
            times = times + self.prices.collective_s(kind, whole, axis)  # type: ignore[attr-defined]
        if kind != "slice":
            times = times + np.where(copied > 0, self.prices.memory_s(copied), 0.0)  # type: ignore[attr-defined]
        return times


class _Arc(NamedTuple):
    """A single step between two states; `copies` are passes over the larger of its buffers."""

    start: int
    end: int
    text: str
    bytes: float
    copies: float


def _clear(layout: Layout, new: str, axis: int) -> bool:
    """Whether no later axis splits a dim that this step moves."""
    moved = {shard_dim(layout[axis]), shard_dim(new)} - {None}
    return not any(shard_dim(p) in moved for p in layout[axis + 1 :] if shard_dim(p) is not None)


def step_between(old: str, new: str, axis: str) -> tuple[str | None, str, float]:
    """Kind, text and local copies (read and write, in buffers) of the single step from `old` to `new`."""
    a, b = shard_dim(old), shard_dim(new)
    if a is not None and b is not None:
        return "all_to_all", f"all_to_all({axis}, {a}, {b})", 4.0 if a or b else 2.0
    if a is not None and new == REPLICATE:
        return "all_gather", f"all_gather({axis}, {a})", 2.0 if a else 0.0
    if old == REPLICATE and b is not None:
        return "slice", f"slice({axis}, {b})", 0.0
    if old == PARTIAL and b is not None:
        return "reduce_scatter", f"reduce_scatter({axis}, {b})", 2.0 if b else 0.0
    if is_partial(old) and new == REPLICATE:
        return "all_reduce", f"all_reduce({axis}, {old[2:-1]})", 0.0
    if old == REPLICATE and new == PARTIAL:
        return "keep_first", f"keep_first({axis})", 1.0
    return None, "", 0.0


def _shortest(count: int, steps: Steps) -> np.ndarray:
    """seconds[i, j] of the cheapest way from i to j: single steps are put in front of what is known until that gains
    nothing."""
    seconds = np.full((count, count), np.inf)
    np.fill_diagonal(seconds, 0.0)
    # Rounds of steps, at most one from each state, so that a round is a few operations on arrays.
    rounds: list[list[tuple[int, int, float]]] = []
    for start, found in steps.items():
        for k, (end, (_, time)) in enumerate(found.items()):
            rounds.extend([] for _ in range(k + 1 - len(rounds)))
            rounds[k].append((start, end, time))
    arcs = [tuple(map(np.array, zip(*group, strict=True))) for group in rounds]
    while True:
        gained = False
        for starts, ends, times in arcs:
            through = times[:, None] + seconds[ends]
            here = seconds[starts]
            if (through < here).any():
                gained = True
                seconds[starts] = np.minimum(through, here)
        if not gained:
            return seconds

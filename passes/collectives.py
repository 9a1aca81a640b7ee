"""Steps of a redistribution as ATen ops and functional collectives on local pieces.

Pieces may be uneven: they are padded to the largest piece before a collective and cut after it, on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..plans.errors import RequestError
from ..plans.layouts import PARTIAL, REPLICATE, Layout, Placement, chunk_sizes, local_range, shard, shard_dim
from ..plans.meshes import Mesh
from ..plans.steps import Step
from . import _torch

__all__ = ["Emitter"]

aten = torch.ops.aten
c10d = _torch.functional


class Emitter:
    """Writes one rank's graph."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        coordinate: tuple[int, ...],
        groups: Sequence[str],
        device: torch.device | None = None,
    ) -> None:
        self.graph, self.mesh, self.coordinate, self.groups = graph, mesh, coordinate, groups
        self.device = device or torch.device("cpu")
        # What the nodes written next belong to: the captured node that they are for, and what they do for it.
        self.origin: tuple[str, str] = ("", "op")

    def call(
        self, target: Any, args: tuple, kwargs: dict[str, Any] | None = None, *, like: fx.Node | None = None
    ) -> fx.Node:
        """Append `target(*args)`; `like` gives the origin for traces. New tensors are made on this rank's device."""
        here = {k: self.device if k == "device" else v for k, v in (kwargs or {}).items()}
        node = self.graph.call_function(target, args, here)
        node.meta["origin"] = self.origin
        if like is not None:
            node.meta.update({k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta})
        return node

    def after(self, step: Step, layout: Layout) -> Layout:
        """The layout that `step` leads to; RequestError when it cannot start from `layout`."""
        axis = self._axis(step)
        before, after = _ends(step)
        later = {shard_dim(p) for p in layout[axis + 1 :]}
        if before == after:
            raise RequestError(f"'step' must move its tensor, got {step}")
        if layout[axis] != before or any(isinstance(d, int) and d in later for d in step.arguments):
            raise RequestError(
                f"'step' must start from {before} with no later axis on its dims, got {step} at {','.join(layout)}"
            )
        return (*layout[:axis], after, *layout[axis + 1 :])

    def step(self, step: Step, x: fx.Node, layout: Layout, value: torch.Tensor) -> fx.Node:
        """Append `step` on local piece `x` of the global tensor `value` that lies in `layout`."""
        axis = self._axis(step)
        parts = self.mesh.shape[axis]
        if parts == 1:
            return x
        shape, dtype = tuple(value.shape), value.dtype
        if step.kind == "slice":
            dim = int(step.arguments[0])
            return self._own(x, axis, dim, self._length(shape, dim, layout))
        if step.kind == "keep_first":
            return x if self.coordinate[axis] == 0 else self.call(aten.zeros_like.default, (x,))
        x, back, extra = self._encoded(x, dtype)
        if step.kind == "all_reduce":
            out = self.all_reduce(x, str(step.arguments[0]), axis)
        elif step.kind == "all_gather":
            out = self._all_gather(x, axis, int(step.arguments[0]), shape, layout, extra)
        elif step.kind == "reduce_scatter":
            out = self._reduce_scatter(x, axis, int(step.arguments[0]), shape, layout, extra)
        else:
            out = self._all_to_all(x, axis, int(step.arguments[0]), int(step.arguments[1]), shape, layout, extra)
        return back(out)

    def all_reduce(self, x: fx.Node, op: str, axis: int) -> fx.Node:
        """Append an all-reduce over mesh axis `axis`."""
        if self.mesh.shape[axis] == 1:
            return x
        return self._wait(self.call(c10d.all_reduce.default, (x, op, self.groups[axis])))

    def offset(self, shape: Sequence[int], dim: int, layout: Layout) -> tuple[int, int]:
        """Offset and length of this rank's piece along `dim`."""
        return local_range(shape[dim], dim, layout, self.mesh.shape, self.coordinate)

    def _axis(self, step: Step) -> int:
        if step.axis not in self.mesh.axis_names:
            raise RequestError(f"'step' must name one of the axes {self.mesh.axis_names}, got {step}")
        return self.mesh.axis_names.index(step.axis)

    def _wait(self, x: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, (x,))

    def _encoded(self, x: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, Any, tuple[int, ...]]:
        """Complex and boolean tensors as what every backend carries; how to undo it; trailing dims that it adds."""
        if dtype.is_complex:
            real = self.call(aten.view_as_real.default, (self.call(aten.resolve_conj.default, (x,)),))
            return real, lambda out: self.call(aten.view_as_complex.default, (self.packed(out),)), (2,)
        if dtype == torch.bool:
            byte = self.call(aten._to_copy.default, (x,), {"dtype": torch.uint8})
            return byte, lambda out: self.call(aten._to_copy.default, (out,), {"dtype": torch.bool}), ()
        return x, lambda out: out, ()

    def packed(self, x: fx.Node) -> fx.Node:
        """Append what makes `x` contiguous and its conjugation real."""
        return self.call(aten.contiguous.default, (x,))

    def _length(self, shape: Sequence[int], dim: int, layout: Layout) -> int:
        return local_range(shape[dim], dim, layout, self.mesh.shape, self.coordinate)[1]

    def _lengths(self, shape: Sequence[int], layout: Layout) -> list[int]:
        return [self._length(shape, d, layout) for d in range(len(shape))]

    def _without(self, layout: Layout, axis: int) -> Layout:
        return (*layout[:axis], "R", *layout[axis + 1 :])

    def _own(self, x: fx.Node, axis: int, dim: int, length: int) -> fx.Node:
        sizes = chunk_sizes(length, self.mesh.shape[axis])
        start = sum(sizes[: self.coordinate[axis]])
        return self.call(aten.slice.Tensor, (x, dim, start, start + sizes[self.coordinate[axis]]))

    def _cut(self, x: fx.Node, dim: int, before: int, after: int) -> fx.Node:
        return x if before == after else self.call(aten.slice.Tensor, (x, dim, 0, after))

    def _padded(self, x: fx.Node, dim: int, rank: int, before: int, after: int) -> fx.Node:
        if before == after:
            return x
        return self.call(aten.constant_pad_nd.default, (x, [0, 0] * (rank - 1 - dim) + [0, after - before]))

    def _all_gather(
        self, x: fx.Node, axis: int, dim: int, shape: Sequence[int], layout: Layout, extra: tuple[int, ...]
    ) -> fx.Node:
        parts, local = self.mesh.shape[axis], [*self._lengths(shape, layout), *extra]
        whole = self._length(shape, dim, self._without(layout, axis))
        piece = -(-whole // parts)
        x = self._padded(x, dim, len(local), local[dim], piece)
        local[dim] = piece
        out = self._wait(self.call(c10d.all_gather_into_tensor.default, (self.packed(x), parts, self.groups[axis])))
        return self._cut(self._merge_front(out, parts, dim, local), dim, piece * parts, whole)

    def _reduce_scatter(
        self, x: fx.Node, axis: int, dim: int, shape: Sequence[int], layout: Layout, extra: tuple[int, ...]
    ) -> fx.Node:
        parts, local = self.mesh.shape[axis], [*self._lengths(shape, layout), *extra]
        whole, piece = local[dim], -(-local[dim] // parts)
        x = self._padded(x, dim, len(local), whole, piece * parts)
        x = self._split_front(x, parts, dim, [*local[:dim], piece, *local[dim + 1 :]])
        out = self._wait(self.call(c10d.reduce_scatter_tensor.default, (x, "sum", parts, self.groups[axis])))
        return self._cut(out, dim, piece, chunk_sizes(whole, parts)[self.coordinate[axis]])

    def _all_to_all(
        self, x: fx.Node, axis: int, old: int, new: int, shape: Sequence[int], layout: Layout, extra: tuple[int, ...]
    ) -> fx.Node:
        parts, local = self.mesh.shape[axis], [*self._lengths(shape, layout), *extra]
        whole = self._length(shape, old, self._without(layout, axis))
        piece, slot = -(-whole // parts), -(-local[new] // parts)
        x = self._padded(x, old, len(local), local[old], piece)
        x = self._padded(x, new, len(local), local[new], slot * parts)
        mine = chunk_sizes(local[new], parts)[self.coordinate[axis]]
        local[old], local[new] = piece, slot
        x = self._split_front(x, parts, new, local)
        splits = [local[0] if local else 1] * parts
        out = self._wait(self.call(c10d.all_to_all_single.default, (x, splits, splits, self.groups[axis])))
        out = self._cut(self._merge_front(out, parts, old, local), old, piece * parts, whole)
        return self._cut(out, new, slot, mine)

    def _merge_front(self, x: fx.Node, parts: int, dim: int, piece: Sequence[int]) -> fx.Node:
        """[parts * piece[0], ...] to the pieces side by side along `dim`."""
        if dim == 0:
            return x
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(piece) + 1)]
        x = self.call(aten.reshape.default, (x, [parts, *piece]))
        x = self.call(aten.permute.default, (x, order))
        return self.call(aten.reshape.default, (x, [*piece[:dim], parts * piece[dim], *piece[dim + 1 :]]))

    def _split_front(self, x: fx.Node, parts: int, dim: int, piece: Sequence[int]) -> fx.Node:
        """The inverse: pieces along `dim` stacked along the first dim, contiguous."""
        if dim:
            x = self.call(aten.reshape.default, (x, [*piece[:dim], parts, piece[dim], *piece[dim + 1 :]]))
            x = self.call(aten.permute.default, (x, [dim, *range(dim), *range(dim + 1, len(piece) + 1)]))
            x = self.call(aten.reshape.default, (x, [parts * piece[0], *piece[1:]]))
        return self.packed(x) if math.prod(piece) else x


def _ends(step: Step) -> tuple[Placement, Placement]:
    """The placement along its axis that a step starts from, and the one that it leads to."""
    words = [shard(word) if isinstance(word, int) else f"P({word})" for word in step.arguments]
    ends: dict[str, tuple[Placement, ...]] = {
        "all_gather": (*words, REPLICATE),
        "slice": (REPLICATE, *words),
        "reduce_scatter": (PARTIAL, *words),
        "all_reduce": (*words, REPLICATE),
        "all_to_all": tuple(words),
        "keep_first": (REPLICATE, PARTIAL),
    }
    before, after = ends[step.kind]
    return before, after

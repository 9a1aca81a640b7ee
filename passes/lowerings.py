"""Local programs of ops that need more than the op itself on local pieces: the dim they work along is split.

sharded_rows      embedding rows split: look up what is here, zero elsewhere (a partial sum); backward keeps own rows
sharded_gather    gather along a split dim: likewise a partial sum
sharded_scatter   scatter a constant along a split dim: write what falls here
sharded_softmax   softmax, log-softmax and their backwards along a split dim: maximum and sum are reduced over the axis
                  (the vocabulary-parallel cross entropy of Megatron-LM)
causal_rows       causal attention for some of the queries and all keys: the mask starts at this rank's first query
                  (context parallelism by gathered keys and values, as in Llama 3, arXiv:2407.21783)
whole             no rule is known: the op itself, on every device, on whole tensors laid out in order
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..plans.layouts import Layout, shard
from .attention import attention_of_nothing, attention_rows, attention_rows_backward
from .collectives import Emitter
from .graph import tensor_args, value_of, values_of
from .naming import op_name
from .regions import Region

__all__ = ["LOWERINGS", "Lowering"]

aten = torch.ops.aten
Lowering = Callable[[Emitter, fx.Node, Any, Any, Sequence["Layout | None"], Sequence["Layout | None"]], fx.Node]


def _here(emit: Emitter, index: fx.Node, start: int, length: int) -> tuple[fx.Node, fx.Node]:
    """Indices relative to this rank's piece, clamped into it, and whether they were in it."""
    moved = emit.call(aten.sub.Tensor, (index, start))
    above = emit.call(aten.ge.Scalar, (moved, 0))
    below = emit.call(aten.lt.Scalar, (moved, length))
    inside = emit.call(aten.logical_and.default, (above, below))
    return emit.call(aten.clamp.default, (moved, 0, max(0, length - 1))), inside


def _not_empty(emit: Emitter, x: fx.Node, dim: int, length: int, rank: int) -> fx.Node:
    """`x`, with one element more along `dim` where it has none: something that an index out of reach can point to."""
    if length:
        return x
    return emit.call(aten.constant_pad_nd.default, (x, [0, 0] * (rank - 1 - dim) + [0, 1]))


def _sharded_rows(emit: Emitter, node: fx.Node, args: Any, kwargs: Any, ins: Any, outs: Any) -> fx.Node:
    if op_name(node) != "embedding":
        return _sharded_rows_backward(emit, node, args, outs)
    weight = value_of(tensor_args(node)[0])
    start, length = emit.offset(weight.shape, 0, ins[0])
    index, inside = _here(emit, args[1], start, length)
    rows = emit.call(aten.embedding.default, (_not_empty(emit, args[0], 0, length, 2), index))
    inside = emit.call(aten.unsqueeze.default, (inside, -1))
    return emit.call(aten.where.self, (inside, rows, _zero(emit, value_of(node))))


def _sharded_rows_backward(emit: Emitter, node: fx.Node, args: Any, outs: Any) -> fx.Node:
    """An index outside of this rank's rows is sent to a spare last row, cut off after: how often the rows here occur,
    by which their gradient may be scaled, stays right."""
    start, length = emit.offset(value_of(node).shape, 0, outs[0])
    grad, index, _, padding, scale = args
    here, inside = _here(emit, index, start, length)
    if padding >= 0:
        inside = emit.call(aten.logical_and.default, (inside, emit.call(aten.ne.Scalar, (index, padding))))
    here = _or_spare(emit, inside, here, length, tensor_args(node)[1])
    wide = emit.call(aten.embedding_dense_backward.default, (grad, here, length + 1, -1, scale))
    return emit.call(aten.slice.Tensor, (wide, 0, 0, length))


def _or_spare(emit: Emitter, inside: fx.Node, index: fx.Node, spare: int, like: fx.Node) -> fx.Node:
    """`index` where `inside`, elsewhere the place after the last one."""
    value = value_of(like)
    last = emit.call(aten.scalar_tensor.default, (spare,), {"dtype": value.dtype, "device": value.device})
    return emit.call(aten.where.self, (inside, index, last))


def _zero(emit: Emitter, value: torch.Tensor) -> fx.Node:
    return emit.call(aten.scalar_tensor.default, (0,), {"dtype": value.dtype, "device": value.device})


def _sharded_gather(emit: Emitter, node: fx.Node, args: Any, kwargs: Any, ins: Any, outs: Any) -> fx.Node:
    x = value_of(tensor_args(node)[0])
    dim = args[1] % x.dim()
    start, length = emit.offset(x.shape, dim, ins[0])
    index, inside = _here(emit, args[2], start, length)
    found = emit.call(aten.gather.default, (_not_empty(emit, args[0], dim, length, x.dim()), dim, index))
    return emit.call(aten.where.self, (inside, found, _zero(emit, value_of(node))))


def _sharded_scatter(emit: Emitter, node: fx.Node, args: Any, kwargs: Any, ins: Any, outs: Any) -> fx.Node:
    """Write the constant where the index falls here: an index elsewhere goes to a spare last place, cut off after."""
    x = value_of(tensor_args(node)[0])
    dim = args[1] % x.dim()
    start, length = emit.offset(x.shape, dim, ins[0])
    index, inside = _here(emit, args[2], start, length)
    index = _or_spare(emit, inside, index, length, tensor_args(node)[1])
    wide = emit.call(aten.constant_pad_nd.default, (args[0], [0, 0] * (x.dim() - 1 - dim) + [0, 1]))
    wide = emit.call(aten.scatter.value, (wide, dim, index, args[3]))
    return emit.call(aten.slice.Tensor, (wide, dim, 0, length))


def _sharded_softmax(emit: Emitter, node: fx.Node, args: Any, kwargs: Any, ins: Any, outs: Any) -> fx.Node:
    short, out = op_name(node), value_of(node)
    dim = (args[2] if short.endswith("backward_data") else args[1]) % out.dim()
    axes = [a for a, placement in enumerate(outs[0]) if placement == shard(dim)]

    def over(x: fx.Node, op: str) -> fx.Node:
        for axis in reversed(axes):
            x = emit.all_reduce(x, op, axis)
        return x

    def total(x: fx.Node) -> fx.Node:
        return over(emit.call(aten.sum.dim_IntList, (x, [dim], True)), "sum")

    if short.endswith("backward_data"):
        return _softmax_backward(emit, node, args, total, log=short.startswith("_log"))
    x = args[0]
    if value_of(tensor_args(node)[0]).dtype != out.dtype:
        x = emit.call(aten._to_copy.default, (x,), {"dtype": out.dtype})
    top = over(_top(emit, x, out, dim, outs[0]), "max")
    shifted = emit.call(aten.sub.Tensor, (x, top))
    power = emit.call(aten.exp.default, (shifted,))
    if short == "_log_softmax":
        return emit.call(aten.sub.Tensor, (shifted, emit.call(aten.log.default, (total(power),))))
    return emit.call(aten.div.Tensor, (power, total(power)))


def _top(emit: Emitter, x: fx.Node, value: torch.Tensor, dim: int, layout: Layout) -> fx.Node:
    """The maximum along `dim` of a piece of `value`; the least of all numbers where the piece is empty."""
    sizes = [emit.offset(value.shape, d, layout)[1] for d in range(value.dim())]
    if sizes[dim]:
        return emit.call(aten.amax.default, (x, [dim], True))
    sizes[dim] = 1
    return emit.call(aten.full.default, (sizes, -math.inf), {"dtype": value.dtype, "device": value.device})


def _softmax_backward(
    emit: Emitter, node: fx.Node, args: Any, total: Callable[[fx.Node], fx.Node], *, log: bool
) -> fx.Node:
    grad, output = args[0], args[1]
    if log:
        spread = emit.call(aten.mul.Tensor, (emit.call(aten.exp.default, (output,)), total(grad)))
        result = emit.call(aten.sub.Tensor, (grad, spread))
    else:
        weighted = emit.call(aten.mul.Tensor, (grad, output))
        result = emit.call(aten.sub.Tensor, (weighted, emit.call(aten.mul.Tensor, (output, total(weighted)))))
    wanted, have = values_of(node)[0], value_of(tensor_args(node)[1])
    if wanted is not None and wanted.dtype != have.dtype:
        return emit.call(aten._to_copy.default, (result,), {"dtype": wanted.dtype})
    return result


def _region(emit: Emitter, node: fx.Node, args: Any, kwargs: Any, ins: Any, outs: Any) -> fx.Node:
    """The user's function, of the alternative with these placements, or its derivative."""
    region: Region = node.meta["region"]
    mesh = emit.mesh.shape
    count = len(region.tree.names)
    at = next(
        at
        for at, one in enumerate(region.alternatives)
        if all(
            n == 1 or p == q
            for want, have in zip(one.ins, ins[:count], strict=True)
            for p, q, n in zip(want, have, mesh, strict=True)
        )
    )

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return region.run(at, tensors)

    def differentiate(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return region.differentiate(at, tensors[:count], tensors[count:])

    if op_name(node) == "meshwright.region":
        return emit.call(run, tuple(args[0]), like=node)
    return emit.call(differentiate, (*args[0], *args[1]), like=node)


def _causal_rows(emit: Emitter, node: fx.Node, args: Any, kwargs: Any, ins: Any, outs: Any) -> fx.Node:
    back = op_name(node).endswith("backward")
    at = 1 if back else 0
    query = value_of(tensor_args(node)[at])
    nothing = attention_of_nothing(node, outs, emit.mesh.shape, emit.coordinate, emit.device)
    if nothing is not None:
        return emit.call(*nothing, like=node)
    first, length = emit.offset(query.shape, 2, ins[at])
    given = [emit.packed(a) if isinstance(a, fx.Node) else a for a in args]
    scale = kwargs.get("scale")
    if emit.device.type != "cpu":
        if back:
            return emit.call(attention_rows_backward, (*given[:4], first, scale), like=node)
        return emit.call(attention_rows, (*given[:3], first, scale), like=node)
    whole = {"device": emit.device}
    rows = emit.call(aten.arange.start, (first, first + length), whole)
    keys = emit.call(aten.arange.default, (query.shape[2],), whole)
    seen = emit.call(aten.ge.Tensor, (emit.call(aten.unsqueeze.default, (rows, 1)), keys))
    like = {"dtype": query.dtype, "device": emit.device}
    never = emit.call(aten.scalar_tensor.default, (float("-inf"),), like)
    mask = emit.call(aten.where.self, (seen, emit.call(aten.scalar_tensor.default, (0.0,), like), never))
    # The last positional argument says that attention is causal.
    return emit.call(node.target, (*given[:-1], False), {**kwargs, "attn_mask": mask}, like=node)


def _whole(emit: Emitter, node: fx.Node, args: Any, kwargs: Any, ins: Any, outs: Any) -> fx.Node:
    packed: Any = fx.map_arg((args, kwargs), emit.packed)
    return emit.call(node.target, *packed, like=node)


LOWERINGS: dict[str, Lowering] = {
    "whole": _whole,
    "region": _region,
    "sharded_rows": _sharded_rows,
    "sharded_gather": _sharded_gather,
    "sharded_scatter": _sharded_scatter,
    "sharded_softmax": _sharded_softmax,
    "causal_rows": _causal_rows,
}

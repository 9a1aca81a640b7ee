"""Op-by-op rewrites into canonical form: what one op becomes, whatever stands around it.

Ops that do nothing go; a product with a bias becomes a product and a sum; a constant depends on nothing; the backward
of a slice is a padding; random numbers are drawn for a shape alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .graph import argument, arguments, emit, replace, value_of

__all__ = ["DECOMPOSED", "DRAWS", "REWRITES", "Rewrite"]

aten = torch.ops.aten
# The node that a node becomes, None where it stays.
Rewrite = Callable[[fx.Graph, fx.Node], "fx.Node | None"]

# Memory that a draw in place fills.
_BLANK = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}

# Fused ops whose parts shard better than the whole: statistics over sharded dims become partial sums.
DECOMPOSED = (
    aten.addmv,
    aten._weight_norm_interface,
    aten._weight_norm_interface_backward,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.softplus_backward,
    aten.baddbmm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.var,
    aten.var_mean,
    aten.std,
    aten.std_mean,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.native_dropout_backward,
    aten.linalg_vector_norm,
    aten.logsumexp,
    aten.select_backward,
    aten.embedding_bag,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten.frobenius_norm,
    aten.norm,
    aten.unfold_backward,
    aten.diagonal_backward,
    aten.trace,
    aten.dot,
    aten.mv,
    aten.addr,
    aten.aminmax,
    aten.renorm,
    aten.rot90,
    aten.block_diag,
    aten.lerp,
    aten.addcdiv,
    aten.addcmul,
    aten.channel_shuffle,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.glu,
    aten.glu_backward,
    aten.stack,
    aten.tril,
    aten.triu,
    aten.roll,
    aten.im2col,
    aten.col2im,
    aten.l1_loss,
    aten.affine_grid_generator,
    aten.index_copy,
    aten.take,
    aten.put,
    aten.vdot,
)


def _addmm(graph: fx.Graph, node: fx.Node) -> fx.Node:
    bias, *factors = arguments(node)
    product = emit(graph, node, aten.mm.default, tuple(factors), node)
    if any(value != 1 for value in node.kwargs.values()):
        product = emit(graph, node, aten.mul.Tensor, (product, node.kwargs.get("alpha", 1)), node)
        bias = emit(graph, node, aten.mul.Tensor, (bias, node.kwargs.get("beta", 1)), node)
    return emit(graph, node, aten.add.Tensor, (product, bias), node)


def _neutral(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """x * 1, x / 1 and x ** 1 are x where they keep its dtype."""
    x, factor = arguments(node)
    plain = type(factor) in (int, float) and factor == 1 and value_of(x).dtype == value_of(node).dtype
    return x if plain else None


def _whole(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A slice of everything and an expansion to the same shape are their input."""
    x = argument(node, 0)
    return x if value_of(x).shape == value_of(node).shape else None


def _constant(fill: float) -> Rewrite:
    return lambda graph, node: _filled(graph, node, fill)


def _given(position: int) -> Rewrite:
    """A constant whose value is an argument."""

    def rewrite(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        fill = argument(node, position)
        return None if isinstance(fill, fx.Node) else _filled(graph, node, fill)

    return rewrite


def _filled(graph: fx.Graph, node: fx.Node, fill: Any) -> fx.Node:
    out = value_of(node)
    extra = {"dtype": out.dtype, "device": out.device}
    return emit(graph, node, aten.full.default, (list(out.shape), fill), node, extra)


def _slice_backward(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    grad, sizes, dim, start, end, step = arguments(node)
    dim %= len(sizes)
    if step == 1:
        return _padded(graph, node, grad, list(sizes), dim, start)
    zeros = _filled(graph, node, 0)
    return emit(graph, node, aten.slice_scatter.default, (zeros, grad, dim, start, end, step), node)


def _slice_scatter(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Into zeros it is a padding."""
    base, source = arguments(node)[:2]
    if base.target is not aten.full.default or argument(base, 1) != 0 or argument(node, 5, 1) != 1:
        return None
    sizes = list(value_of(node).shape)
    return _padded(graph, node, source, sizes, argument(node, 2, 0) % len(sizes), argument(node, 3))


def _padded(graph: fx.Graph, node: fx.Node, x: fx.Node, sizes: list[int], dim: int, start: int | None) -> fx.Node:
    """`x` from `start` on along `dim` of a tensor of zeros of `sizes`."""
    size = sizes[dim]
    start = max(0, (start or 0) + (size if (start or 0) < 0 else 0))
    after = size - start - value_of(x).shape[dim]
    if start == 0 and after == 0:
        return x
    pads = [0, 0] * (len(sizes) - 1 - dim) + [start, after]
    return emit(graph, node, aten.constant_pad_nd.default, (x, pads), node)


def _squeeze(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The dims that go are those of one element in the whole tensor, not those of a piece."""
    x = argument(node, 0)
    shape, dims = value_of(x).shape, argument(node, 1)
    asked = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = [d % len(shape) for d in asked if shape[d] == 1] if shape else []
    if not gone:
        return x
    if dims is not None and len(gone) == len(asked):
        return None
    return emit(graph, node, aten.squeeze.dims, (x, gone), node)


def _broadcast(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x, shape, dims = arguments(node)
    wide = [1] * len(shape)
    for size, dim in zip(value_of(x).shape, dims, strict=True):
        wide[dim] = size
    return emit(
        graph, node, aten.expand.default, (emit(graph, node, aten.reshape.default, (x, wide), node), list(shape)), node
    )


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """copy(into, source) is the source with the shape and dtype of what it replaces."""
    source, out = argument(node, 1), value_of(node)
    if value_of(source).dtype != out.dtype:
        source = emit(graph, node, aten._to_copy.default, (source,), node, {"dtype": out.dtype})
    if value_of(source).shape == out.shape:
        return source
    return emit(graph, node, aten.expand.default, (source, list(out.shape)), node)


def _native_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Dropout as a mask and a product, so that only the mask is drawn whole."""
    x, p, train = arguments(node)
    if train is False or not 0 < p < 1:
        return
    value = value_of(x)
    mask = _mask(graph, node, value, _memory_order(value), torch.bool, 1 - p)
    for user in list(node.users):
        if argument(user, 1) == 1:
            replace(user, mask)
        else:
            kept = emit(graph, user, aten.mul.Tensor, (x, mask), node)
            replace(user, emit(graph, user, aten.mul.Tensor, (kept, 1 / (1 - p)), node))
    graph.erase_node(node)  # a draw is not dead code


def _as_strided(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A strided view of a dense tensor is a reshape of the whole, or reads its elements by their places in memory."""
    x, size, stride = arguments(node)[:3]
    value, out, offset = value_of(x), value_of(node), argument(node, 3, 0) or 0
    order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
    if not value.permute(order).is_contiguous() or value.storage_offset() or not out.numel():
        return None
    if order != sorted(order):
        x = emit(graph, node, aten.permute.default, (x, order), node)
    if out.is_contiguous() and value.numel() == out.numel() and not offset:
        return emit(graph, node, aten.reshape.default, (x, list(out.shape)), node)
    if offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= value.numel():
        return None
    flat = emit(graph, node, aten.reshape.default, (x, [value.numel()]), node)
    return emit(graph, node, aten.index.Tensor, (flat, [_places(graph, node, size, stride, offset)]), node)


def _places(graph: fx.Graph, node: fx.Node, size: list[int], stride: list[int], offset: int) -> fx.Node:
    """Where the elements of a strided view lie in memory, int64 of `size`."""
    made = {"dtype": torch.int64, "device": value_of(node).device}
    places = emit(graph, node, aten.full.default, (list(size), offset), node, made)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        if step:
            along = emit(graph, node, aten.arange.start_step, (0, n * step, step), node, made)
            shape = [n if d == dim else 1 for d in range(len(size))]
            along = emit(graph, node, aten.reshape.default, (along, shape), node)
            places = emit(graph, node, aten.add.Tensor, (places, along), node)
    return places


def _as_strided_scatter(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """What fills the whole of a contiguous tensor in order is a reshape of it; else elements are put into places."""
    base, source, size, stride = arguments(node)[:4]
    value, offset = value_of(base), argument(node, 4, 0) or 0
    if not value.is_contiguous() or value.storage_offset():
        return None
    shape, count = list(value_of(node).shape), value_of(source).numel()
    if torch.empty(size, device="meta").stride() == tuple(stride) and count == value.numel() and not offset:
        return emit(graph, node, aten.reshape.default, (source, shape), node)
    flat = emit(graph, node, aten.reshape.default, (base, [value.numel()]), node)
    put = (flat, [_places(graph, node, size, stride, offset)], source)
    return emit(graph, node, aten.reshape.default, (emit(graph, node, aten.index_put.default, put, node), shape), node)


def _masked_fill(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """By a value that is a tensor of no dims: a choice."""
    x, mask, value = arguments(node)
    if value_of(value).dtype != value_of(x).dtype:
        value = emit(graph, node, aten._to_copy.default, (value,), node, {"dtype": value_of(x).dtype})
    return emit(graph, node, aten.where.self, (mask, value, x), node)


def _renamed(target: Any, of_number: Callable[[complex], complex]) -> Rewrite:
    """A lazy view as the op that computes it; autograd takes it of plain numbers, too."""

    def rewrite(graph: fx.Graph, node: fx.Node) -> fx.Node:
        x = argument(node, 0)
        if isinstance(x, fx.Node):
            return emit(graph, node, target, node.args, node, dict(node.kwargs))
        return _filled(graph, node, of_number(x))

    return rewrite


def _drawn(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A random draw looks only at the shape and strides of its input: numbers are drawn in the order of memory."""
    like, *rest = arguments(node)
    value = value_of(like)
    if node.target is aten.bernoulli.p:
        # In place it fills memory in order; out of place, of given data, it goes by the order of the dims.
        order = _memory_order(value) if like.target in _BLANK else list(range(value.dim()))
        return _mask(graph, node, value, order, value.dtype, *rest)
    made = {"dtype": value.dtype, "device": value.device}
    blank = emit(graph, node, aten.empty_strided.default, (list(value.shape), list(value.stride())), node, made)
    return emit(graph, node, node.target, (blank, *rest), node, dict(node.kwargs))


def _memory_order(value: torch.Tensor) -> list[int]:
    """The dims of what PyTorch makes like `value`, those with the largest strides first."""
    stride = torch.empty_like(torch.empty_strided(value.shape, value.stride(), device="meta")).stride()
    return sorted(range(value.dim()), key=lambda d: (-stride[d], d))


def _mask(
    graph: fx.Graph, node: fx.Node, like: torch.Tensor, order: list[int], dtype: torch.dtype, *rest: Any
) -> fx.Node:
    """bernoulli of the shape of `like`, drawn along its dims in `order`; the op itself knows no strides."""
    packed = [like.shape[d] for d in order]
    dense = list(torch.empty(packed, device="meta").stride())
    made = {"dtype": dtype, "device": like.device}
    blank = emit(graph, node, aten.empty_strided.default, (packed, dense), node, made)
    drawn = emit(graph, node, aten.bernoulli.p, (blank, *rest), node)
    if order == sorted(order):
        return drawn
    return emit(graph, node, aten.permute.default, (drawn, [order.index(d) for d in range(len(order))]), node)


def _scattered_constant(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """One constant per row written into another constant is a choice by position: it splits along every dim, and a
    compiled program fuses it (the backward of a cross entropy is such a one)."""
    base, dim, index, value = arguments(node)
    out = value_of(node)
    if base.target is not aten.full.default or isinstance(value, fx.Node) or not out.dim():
        return None
    dim %= out.dim()
    wanted = [1 if d == dim else n for d, n in enumerate(out.shape)]
    if list(value_of(index).shape) != wanted:
        return None
    where = {"dtype": torch.int64, "device": out.device}
    places = emit(graph, node, aten.arange.default, (out.shape[dim],), node, where)
    shape = [n if d == dim else 1 for d, n in enumerate(out.shape)]
    hit = emit(
        graph, node, aten.eq.Tensor, (index, emit(graph, node, aten.reshape.default, (places, shape), node)), node
    )
    made = {"dtype": out.dtype, "device": out.device}
    new = emit(graph, node, aten.scalar_tensor.default, (value,), node, made)
    old = emit(graph, node, aten.scalar_tensor.default, (base.args[1],), node, made)
    return emit(graph, node, aten.where.self, (hit, new, old), node)


# Draws, rewritten before what they are drawn for.
DRAWS: dict[Any, Rewrite] = {
    aten.bernoulli.p: _drawn,
    aten.rand_like.default: _drawn,
    aten.randn_like.default: _drawn,
    aten.uniform.default: _drawn,
    aten.normal_functional.default: _drawn,
    aten.exponential.default: _drawn,
    aten.geometric.default: _drawn,
    aten.log_normal.default: _drawn,
    aten.cauchy.default: _drawn,
}
REWRITES: dict[Any, Rewrite] = {
    aten.addmm.default: _addmm,
    aten.copy.default: _copied,
    aten._conj.default: _renamed(aten.conj_physical.default, lambda x: x.conjugate()),
    aten._neg_view.default: _renamed(aten.neg.default, operator.neg),
    aten.native_dropout.default: _native_dropout,
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.masked_fill.Tensor: _masked_fill,
    torch.ops.prims.broadcast_in_dim.default: _broadcast,
    aten.pow.Tensor_Scalar: _neutral,
    aten.mul.Tensor: _neutral,
    aten.mul.Scalar: _neutral,
    aten.div.Tensor: _neutral,
    aten.div.Scalar: _neutral,
    aten.expand.default: _whole,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _whole,
    aten.new_zeros.default: _constant(0),
    aten.new_ones.default: _constant(1),
    aten.zeros_like.default: _constant(0),
    aten.ones_like.default: _constant(1),
    aten.zeros.default: _constant(0),
    aten.ones.default: _constant(1),
    aten.empty.memory_format: _constant(0),
    aten.empty_like.default: _constant(0),
    aten.new_empty.default: _constant(0),
    aten.new_full.default: _given(2),
    aten.full_like.default: _given(1),
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.scatter.value: _scattered_constant,
}

"""Canonical form of a joint graph: the same numbers, in the ops that shard best.

* Views that only flatten leading dims before a matrix product are folded into an einsum over the real dims, so that a
  batch or sequence dim can be sharded through a linear layer (a flattened [batch * seq] dim can be split by batch only).
* Aliases, detaches and clones go (the graph is functional and local programs reshape), as do metadata assertions.
* A mean becomes a sum and a division: the mean of uneven shards' means is not the mean.
* Casts and views of a parameter are repeated for the backward pass, so that a gathered parameter is not kept alive for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .graph import Captured, value_of

__all__ = ["DECOMPOSED", "VIEWS", "canonicalize", "emit"]

aten = torch.ops.aten

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
)
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_IDENTITIES = {aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_ASSERTIONS = {aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_scalar.default}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def canonicalize(captured: Captured) -> None:
    """Rewrite `captured` in place into canonical form."""
    graph = captured.graph
    _simplify(graph)
    _drop_noise(graph)
    _unpack(graph)
    _means(graph)
    _permutes(graph)
    _fold_products(graph)
    _fold_flat_ops(graph)
    _merge_views(graph)
    graph.eliminate_dead_code()
    _reread(captured)
    captured.backward = _backward(captured)
    _repeat_parameter_views(captured)
    graph.eliminate_dead_code()
    _reread(captured)
    captured.backward = _backward(captured)
    captured.module.recompile()


def emit(graph: fx.Graph, before: fx.Node, target: Any, args: tuple, like: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Insert `target(*args)` before a node, with its fake value and the origin of `like`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs or {})
    values = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    mode = _mode(values)
    if mode is None:
        node.meta["val"] = target(*values[0], **values[1])
    else:
        with mode:
            node.meta["val"] = target(*values[0], **values[1])
    for key in ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def _mode(values: Any) -> Any:
    found = [v.fake_mode for v in torch.utils._pytree.tree_leaves(values) if hasattr(v, "fake_mode")]
    return found[0] if found else None


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _drop_noise(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS:
            graph.erase_node(node)
        elif node.target in _IDENTITIES and value_of(node).dtype == value_of(node.args[0]).dtype:
            _replace(node, node.args[0])


def _unpack(graph: fx.Graph) -> None:
    """Views with several results become one view per result: a split its slices, an unbind its selections."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int):
            continue
        x = node.args[0]
        ndim = value_of(x).dim()
        unbind = node.target is aten.unbind.int
        position = 1 if unbind else 2
        dim = (node.args[position] if len(node.args) > position else 0) % ndim
        start = 0
        ends = []
        for value in node.meta["val"]:
            ends.append((start, start + (1 if unbind else value.shape[dim])))
            start = ends[-1][1]
        for user in list(node.users):
            first, last = ends[user.args[1]]
            args = (x, dim, first) if unbind else (x, dim, first, last)
            _replace(user, emit(graph, user, aten.select.int if unbind else aten.slice.Tensor, args, node))
        graph.erase_node(node)


def _simplify(graph: fx.Graph) -> None:
    """Ops that do nothing go; a product with a bias becomes a product and a sum; a constant depends on nothing;
    the backward of a slice is a padding."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        rewrite = _REWRITES.get(node.target)
        new = rewrite(graph, node) if rewrite is not None else None
        if new is not None:
            _replace(node, new)


def _addmm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if any(value != 1 for value in node.kwargs.values()):
        product = emit(graph, node, aten.mul.Tensor, (_mm(graph, node), node.kwargs.get("alpha", 1)), node)
        bias = emit(graph, node, aten.mul.Tensor, (node.args[0], node.kwargs.get("beta", 1)), node)
        return emit(graph, node, aten.add.Tensor, (product, bias), node)
    return emit(graph, node, aten.add.Tensor, (_mm(graph, node), node.args[0]), node)


def _mm(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return emit(graph, node, aten.mm.default, tuple(node.args[1:3]), node)


def _power(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x: Any = node.args[0]
    return x if node.args[1] == 1 and value_of(x).dtype == value_of(node).dtype else None


def _scaled(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x: Any = node.args[0]
    plain = type(node.args[1]) in (int, float) and node.args[1] == 1 and value_of(x).dtype == value_of(node).dtype
    return x if plain else None


def _constant(value: float | None) -> Callable[[fx.Graph, fx.Node], fx.Node | None]:
    def rewrite(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        out = value_of(node)
        fill: Any = value
        if fill is None:
            fill = node.args[2] if node.target is aten.new_full.default else node.args[1]
        if isinstance(fill, fx.Node):
            return None
        extra = {"dtype": out.dtype, "device": out.device}
        return emit(graph, node, aten.full.default, (list(out.shape), fill), node, extra)

    return rewrite


def _slice_backward(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    grad, sizes, dim, start, end, step = node.args
    return _padded(graph, node, grad, list(sizes), dim % len(sizes), start, end, step)


def _slice_scatter(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    base: Any = node.args[0]
    if base.target is not aten.full.default or base.args[1] != 0:
        return None
    _, source, dim, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 2 :])
    ndim = value_of(node).dim()
    return _padded(graph, node, source, list(value_of(node).shape), dim % ndim, start, end, step)


def _padded(graph: fx.Graph, node: fx.Node, source: Any, sizes: list[int], dim: int, start: Any, end: Any, step: int) -> fx.Node | None:
    if step != 1:
        if node.target is not aten.slice_backward.default:
            return None
        zeros = emit(graph, node, aten.full.default, (sizes, 0), node, {"dtype": value_of(node).dtype, "device": value_of(node).device})
        return emit(graph, node, aten.slice_scatter.default, (zeros, source, dim, start, end, step), node)
    size = sizes[dim]
    start = max(0, (start or 0) + (size if (start or 0) < 0 else 0))
    after = size - start - value_of(source).shape[dim]
    if start == 0 and after == 0:
        return source
    return emit(graph, node, aten.constant_pad_nd.default, (source, [0, 0] * (len(sizes) - 1 - dim) + [start, after]), node)


def _broadcast(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, shape, dims = node.args
    wide = [1] * len(shape)
    for size, dim in zip(value_of(x).shape, dims, strict=True):
        wide[dim] = size
    return emit(graph, node, aten.expand.default, (emit(graph, node, aten.reshape.default, (x, wide), node), list(shape)), node)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """copy(into, source) is the source with the shape and dtype of what it replaces."""
    source: Any = node.args[1]
    out = value_of(node)
    if value_of(source).dtype != out.dtype:
        source = emit(graph, node, aten._to_copy.default, (source,), node, {"dtype": out.dtype})
    return source if value_of(source).shape == out.shape else emit(graph, node, aten.expand.default, (source, list(out.shape)), node)


def _native_dropout(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Dropout as a mask and a product, so that only the mask is drawn whole."""
    x, p, train = node.args
    if train is False or not 0 < p < 1:
        return None
    value = value_of(x)
    like = emit(graph, node, aten.empty_strided.default, (list(value.shape), list(value.stride())), node, {"dtype": torch.bool})
    mask = emit(graph, node, aten.bernoulli.p, (like, 1 - p), node)
    for user in list(node.users):
        if user.args[1] == 1:
            _replace(user, mask)
        else:
            kept = emit(graph, user, aten.mul.Tensor, (x, mask), node)
            _replace(user, emit(graph, user, aten.mul.Tensor, (kept, 1 / (1 - p)), node))
    return None


def _as_strided(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A strided view of a whole contiguous tensor is a reshape; any other one has no layout."""
    x: Any = node.args[0]
    value, out = value_of(x), value_of(node)
    offset = node.args[3] if len(node.args) > 3 else 0
    if value.is_contiguous() and out.is_contiguous() and value.numel() == out.numel() and not offset:
        return emit(graph, node, aten.reshape.default, (x, list(out.shape)), node)
    return None


def _renamed(target: Any) -> Callable[[fx.Graph, fx.Node], fx.Node | None]:
    return lambda graph, node: emit(graph, node, target, node.args, node, dict(node.kwargs))


def _drawn(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A random draw looks only at the shape and strides of its input: numbers are drawn in the order of memory."""
    like: Any = node.args[0]
    value = value_of(like)
    if like.target is aten.empty_strided.default:
        return None
    extra = {"dtype": value.dtype, "device": value.device}
    blank = emit(graph, node, aten.empty_strided.default, (list(value.shape), list(value.stride())), node, extra)
    return emit(graph, node, node.target, (blank, *node.args[1:]), node, dict(node.kwargs))


_REWRITES: dict[Any, Callable[[fx.Graph, fx.Node], fx.Node | None]] = {
    aten.addmm.default: _addmm,
    aten.copy.default: _copied,
    aten._conj.default: _renamed(aten.conj_physical.default),
    aten._neg_view.default: _renamed(aten.neg.default),
    aten.bernoulli.p: _drawn,
    aten.native_dropout.default: _native_dropout,
    aten.as_strided.default: _as_strided,
    aten.rand_like.default: _drawn,
    aten.randn_like.default: _drawn,
    torch.ops.prims.broadcast_in_dim.default: _broadcast,
    aten.pow.Tensor_Scalar: _power,
    aten.mul.Tensor: _scaled,
    aten.mul.Scalar: _scaled,
    aten.div.Tensor: _scaled,
    aten.div.Scalar: _scaled,
    aten.new_zeros.default: _constant(0),
    aten.new_ones.default: _constant(1),
    aten.zeros_like.default: _constant(0),
    aten.ones_like.default: _constant(1),
    aten.zeros.default: _constant(0),
    aten.ones.default: _constant(1),
    aten.empty_like.default: _constant(0),
    aten.new_empty.default: _constant(0),
    aten.new_full.default: _constant(None),
    aten.full_like.default: _constant(None),
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
}


def _means(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is aten.mean.default:
            x, dims, keep = node.args[0], None, False
        elif node.target is aten.mean.dim:
            x, dims, keep = node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else False
        else:
            continue
        shape = value_of(x).shape
        every = range(len(shape)) if dims is None or list(dims) == [] else [d % max(1, len(shape)) for d in dims]
        count = math.prod(shape[d] for d in every)
        dtype = node.kwargs.get("dtype")
        extra = {"dtype": dtype} if dtype is not None else {}
        total = emit(graph, node, aten.sum.dim_IntList, (x, list(every), keep), node, extra)
        _replace(node, emit(graph, node, aten.div.Scalar, (total, count), node))


def _permutes(graph: fx.Graph) -> None:
    """t and transpose become permute; a permute of a permute becomes one, or nothing."""
    for node in list(graph.nodes):
        order = _order(node)
        if order is None:
            continue
        x = node.args[0]
        while (inner := _order(x)) is not None:
            order, x = [inner[d] for d in order], x.args[0]
        if order == list(range(len(order))):
            _replace(node, x)
        elif node.target is not aten.permute.default or x is not node.args[0]:
            _replace(node, emit(graph, node, aten.permute.default, (x, order), node))


def _order(node: Any) -> list[int] | None:
    """The dim order of a permutation node, None for another node."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    ndim = value_of(node).dim() if node.target in VIEWS else 0
    if node.target is aten.permute.default:
        return [d % ndim for d in node.args[1]]
    if node.target is aten.t.default:
        return list(range(ndim))[::-1]
    if node.target is aten.transpose.int:
        order = list(range(ndim))
        a, b = node.args[1] % ndim, node.args[2] % ndim
        order[a], order[b] = b, a
        return order
    return None


# An operand as seen through its views: the base tensor and, for each of its dims, its role: the operand dim that it is
# part of, then its place among the parts.
_Role = tuple[int, ...]
_Operand = tuple[fx.Node, list[_Role]]


def _unflatten(node: fx.Node, splittable: Callable[[int], bool]) -> _Operand:
    """Look through permutes and flattening views of an operand as long as only `splittable` dims are split."""
    roles: list[_Role] = [(d,) for d in range(value_of(node).dim())]
    while True:
        order = _order(node)
        if order is not None:
            inner: list[_Role] = [()] * len(order)
            for position, dim in enumerate(order):
                inner[dim] = roles[position]
            node, roles = node.args[0], inner  # type: ignore[assignment]
            continue
        parts = _flattened(node) if node.op == "call_function" and node.target in _RESHAPES else None
        if parts is None or any(len(part) != 1 and not splittable(roles[d][0]) for d, part in enumerate(parts)):
            return node, roles
        roles = [(*roles[d], place) for d, part in enumerate(parts) for place, _ in enumerate(part)]
        node = node.args[0]  # type: ignore[assignment]


def _flattened(node: fx.Node) -> list[list[int]] | None:
    """For a reshape that only merges dims: the input dims in each output dim. None for any other reshape."""
    before, after = list(value_of(node.args[0]).shape), list(value_of(node).shape)
    if 0 in before or not after:
        return None
    parts: list[list[int]] = []
    at = 0
    for size in after:
        part, product = [], 1
        while at < len(before) and (not part or product < size):
            part.append(at)
            product *= before[at]
            at += 1
        if product != size:
            return None
        parts.append(part)
    if at < len(before):
        if any(n != 1 for n in before[at:]):
            return None
        parts[-1].extend(range(at, len(before)))
    return parts


def _fold_products(graph: fx.Graph) -> None:
    """mm and bmm of flattened operands become an einsum over the dims before flattening."""
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            left, right, result = "mk", "kn", "mn"
        elif node.target is aten.bmm.default:
            left, right, result = "bmk", "bkn", "bmn"
        else:
            continue
        folded = _fold(node, left, right, result)
        if folded is not None:
            _replace(node, folded)


def _fold(node: fx.Node, left: str, right: str, result: str) -> fx.Node | None:
    graph = node.graph
    shared = [label for label in left if label in right]
    for free in ([*left, *right], [label for label in (*left, *right) if label not in shared]):
        (a, a_roles), (b, b_roles) = (
            _unflatten(operand, lambda d, labels=labels: labels[d] in free)
            for operand, labels in ((node.args[0], left), (node.args[1], right))
        )
        sizes = {label: _sizes(a, a_roles, left, label) or _sizes(b, b_roles, right, label) for label in {*left, *right}}
        if all(_sizes(a, a_roles, left, label) == _sizes(b, b_roles, right, label) for label in shared):
            break
    else:
        return None
    if a is node.args[0] and b is node.args[1] and node.target is aten.bmm.default:
        return None
    letters, names = iter(_LETTERS), {}
    for label in result + "".join(label for label in shared if label not in result):
        names[label] = [next(letters) for _ in sizes[label]]
    output = "".join("".join(names[label]) for label in result)
    equation = f"{_spell(a_roles, left, names)},{_spell(b_roles, right, names)}->{output}"
    product = emit(graph, node, aten.einsum.default, (equation, [a, b]), node)
    if value_of(product).shape == value_of(node).shape:
        return product
    return emit(graph, node, aten.reshape.default, (product, list(value_of(node).shape)), node)


def _sizes(node: fx.Node, roles: Sequence[_Role], labels: str, label: str) -> list[int]:
    """Sizes of the parts of the operand dim called `label`, in the order in which they were flattened."""
    parts = sorted((role, size) for role, size in zip(roles, value_of(node).shape, strict=True) if labels[role[0]] == label)
    return [size for _, size in parts]


def _spell(roles: Sequence[_Role], labels: str, names: dict[str, list[str]]) -> str:
    """Letters of the dims of an operand: the parts of a dim are lettered in the order in which they were flattened."""
    ranks = {role: sorted(r for r in roles if labels[r[0]] == labels[role[0]]).index(role) for role in roles}
    return "".join(names[labels[role[0]]][ranks[role]] for role in roles)


_ROWWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor}


def _fold_flat_ops(graph: fx.Graph) -> None:
    """A bias added to flattened rows is added before flattening; a sum over flattened rows runs over the real dims."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        flat = node.args[0]
        parts = _flattened(flat) if flat.op == "call_function" and flat.target in _RESHAPES else None
        if parts is None or len(parts) != 2 or len(parts[1]) != 1:
            continue
        x, shape = flat.args[0], list(value_of(node).shape)
        if node.target in _ROWWISE and not isinstance(node.args[1], fx.Node):
            continue
        if node.target in _ROWWISE and value_of(node.args[1]).dim() == 1 and shape[-1] == value_of(flat).shape[-1]:
            wide = emit(graph, node, node.target, (x, *node.args[1:]), node, dict(node.kwargs))
        elif node.target is aten.sum.dim_IntList and [d % 2 for d in node.args[1]] == [0] and not node.kwargs:
            wide = emit(graph, node, aten.sum.dim_IntList, (x, parts[0], *node.args[2:]), node)
        else:
            continue
        _replace(node, wide if list(value_of(wide).shape) == shape else emit(graph, node, aten.reshape.default, (wide, shape), node))


def _merge_views(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _RESHAPES:
            continue
        x = node.args[0]
        while x.op == "call_function" and x.target in _RESHAPES:
            x = x.args[0]
        shape = list(value_of(node).shape)
        if list(value_of(x).shape) == shape:
            _replace(node, x)
        elif x is not node.args[0] or node.target is not aten.reshape.default:
            _replace(node, emit(graph, node, aten.reshape.default, (x, shape), node))


def _reread(captured: Captured) -> None:
    """Follow outputs that the rewrites replaced: the output node's arguments are the truth."""
    result = next(iter(captured.graph.find_nodes(op="output")))
    now = iter(result.args[0])  # type: ignore[arg-type]
    for desc in result.meta["desc"]:
        node = next(now)
        kind = type(desc).__name__
        if kind == "PlainAOTOutput":
            captured.outputs[desc.idx] = node
        elif kind == "InputMutationAOTOutput":
            captured.mutations[captured.order[desc.mutated_input.idx]] = node
        elif kind == "GradAOTOutput" and node is not None:
            captured.grads[captured.order[desc.grad_of.idx]] = node


def _backward(captured: Captured) -> set[fx.Node]:
    """Everything that the outputs and the mutated buffers do not need."""
    forward: set[fx.Node] = set()
    stack = [n for n in (*captured.outputs, *captured.mutations.values()) if n is not None]
    while stack:
        node = stack.pop()
        if node not in forward:
            forward.add(node)
            stack.extend(node.all_input_nodes)
    return {n for n in captured.graph.nodes if n.op == "call_function" and n not in forward}


def _repeat_parameter_views(captured: Captured) -> None:
    graph = captured.graph
    derived: set[fx.Node] = {n for n, s in captured.sources.items() if s.kind == "parameter"}
    cheap = VIEWS | {aten._to_copy.default}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in captured.backward or node.target not in cheap or node.args[0] not in derived:
            continue
        derived.add(node)
        users = [u for u in node.users if u in captured.backward]
        if not users:
            continue
        first = next(n for n in graph.nodes if n in users)
        again = emit(graph, first, node.target, node.args, users[0], dict(node.kwargs))
        captured.backward.add(again)
        for user in users:
            user.replace_input_with(node, again)


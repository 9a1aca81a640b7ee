"""Canonical form of a joint graph: the same numbers, in the ops that shard best.

* What a checkpointed region draws again is what it drew first (draws.py).
* Single ops become simpler ones (rewrites.py).
* Views that only flatten leading dims before a matrix product are folded into an einsum over the real dims
  (products.py), so that a batch or sequence dim can be sharded through a linear layer.
* Aliases, detaches and clones go (the graph is functional and local programs reshape), as do metadata assertions.
* A mean becomes a sum and a division: the mean of uneven shards' means is not the mean.
* Casts and views of a parameter are repeated for the backward pass, so that a gathered parameter is not kept alive
  for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from . import _torch
from .draws import reuse_draws
from .graph import Captured, argument, emit, replace, value_of
from .naming import draws_random
from .products import fold_flat_ops, fold_products, merge_permutes, merge_reshapes
from .rewrites import DECOMPOSED, DRAWS, REWRITES

__all__ = ["DECOMPOSED", "VIEWS", "canonicalize"]

aten = torch.ops.aten

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
    aten.alias.default,
}
_IDENTITIES = {
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
}
_ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._linalg_check_errors.default,
}


_SPLITS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}


def canonicalize(captured: Captured) -> None:
    """Rewrite `captured` in place into canonical form. Its outputs, gradients and mutations follow; names do not."""
    graph = captured.graph
    reuse_draws(graph)
    _simplify(graph)
    _drop_noise(graph)
    _unpack(graph)
    _means(graph)
    merge_permutes(graph)
    fold_products(graph)
    fold_flat_ops(graph)
    merge_reshapes(graph)
    _settle(captured)
    _repeat_parameter_views(captured)
    _settle(captured)
    captured.module.recompile()


def _settle(captured: Captured) -> None:
    """Drop what nothing reads, follow replaced outputs, and find anew where the backward begins."""
    captured.graph.eliminate_dead_code()
    _reread(captured)
    captured.backward = _backward(captured)


def _simplify(graph: fx.Graph) -> None:
    for table in (DRAWS, REWRITES):
        for node in list(graph.nodes):
            rewrite = table.get(node.target) if node.op == "call_function" else None
            new = rewrite(graph, node) if rewrite is not None else None
            if new is not None:
                replace(node, new)


def _drop_noise(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS:
            graph.erase_node(node)
        elif node.target in _IDENTITIES and value_of(node).dtype == value_of(node.args[0]).dtype:
            replace(node, node.args[0])


def _unpack(graph: fx.Graph) -> None:
    """Views with several results become one view per result: a split its slices, an unbind its selections."""
    for node in list(graph.nodes):
        if node.target is aten.unbind.int:
            _unpack_one(graph, node, argument(node, 1, 0), aten.select.int)
        elif node.target in _SPLITS:
            _unpack_one(graph, node, argument(node, 2, 0), aten.slice.Tensor)


def _unpack_one(graph: fx.Graph, node: fx.Node, dim: int, target: Any) -> None:
    x = argument(node, 0)
    dim %= value_of(x).dim()
    ranges: list[tuple[int, ...]] = []
    start = 0
    for value in node.meta["val"]:
        length = 1 if target is aten.select.int else value.shape[dim]
        ranges.append((start,) if target is aten.select.int else (start, start + length))
        start += length
    for user in list(node.users):
        replace(user, emit(graph, user, target, (x, dim, *ranges[argument(user, 1)]), node))
    graph.erase_node(node)


def _means(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target not in (aten.mean.default, aten.mean.dim):
            continue
        x, dims, keep = argument(node, 0), argument(node, 1), argument(node, 2, False)
        shape = value_of(x).shape
        over = [d % max(1, len(shape)) for d in dims] if dims else list(range(len(shape)))
        dtype = node.kwargs.get("dtype")
        total = emit(
            graph, node, aten.sum.dim_IntList, (x, over, keep), node, {} if dtype is None else {"dtype": dtype}
        )
        count = math.prod(shape[d] for d in over)
        replace(node, emit(graph, node, aten.div.Scalar, (total, count), node))


def _reread(captured: Captured) -> None:
    """Follow outputs that the rewrites replaced: the output node's arguments are the truth."""
    result = next(iter(captured.graph.find_nodes(op="output")))
    for desc, node in zip(result.meta["desc"], argument(result, 0), strict=True):
        kind = type(desc)
        if kind is _torch.PlainAOTOutput:
            captured.outputs[desc.idx] = node
        elif kind is _torch.InputMutationAOTOutput:
            captured.mutations[captured.order[desc.mutated_input.idx]] = node
        elif kind is _torch.GradAOTOutput and node is not None:
            captured.grads[captured.order[desc.grad_of.idx]] = node


def _backward(captured: Captured) -> set[fx.Node]:
    """Everything that the outputs and the mutated buffers do not need. What the forward drew stays there, whoever
    reads it: the draws after it rely on it."""
    forward: set[fx.Node] = set()
    stack = [n for n in (*captured.outputs, *captured.mutations.values()) if n is not None]
    stack += [n for n in captured.graph.nodes if draws_random(n) and n.meta.get("partitioner_tag") != "is_backward"]
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
        forward = node.op == "call_function" and node not in captured.backward
        if not forward or node.target not in cheap or argument(node, 0) not in derived:
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

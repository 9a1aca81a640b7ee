"""Rules of products, reductions, normalisations, indexing, attention and convolutions."""

from __future__ import annotations

from typing import Any

from torch import fx

from ....passes.graph import argument, named_arguments, tensor_args, value_of, values_of
from ....plans.layouts import PARTIAL, REPLICATE, shard
from .rule import Link, Rule, RuleFunction, from_links, replicated

__all__ = ["MATH_RULES"]


def _present(node: fx.Node) -> list[bool]:
    return [value is not None for value in values_of(node)]


def _einsum(node: fx.Node) -> list[Rule]:
    return _product(argument(node, 0))


def _product(equation: str) -> list[Rule]:
    operands, result = equation.split("->")
    names = operands.split(",")
    links: list[Link] = []
    for letter in dict.fromkeys("".join(names)):
        where = [n.index(letter) if letter in n else None for n in names]
        links.append(((result.index(letter) if letter in result else None,), where))
    return from_links(links, [True], len(names))


def _matmul(equation: str) -> RuleFunction:
    return lambda node: _product(equation)


def _reduced(node: fx.Node) -> tuple[list[int], dict[int, int]]:
    """Reduced dims of a reduction, and where each other dim ends up."""
    ndim = value_of(tensor_args(node)[0]).dim()
    dims = argument(node, 1)
    dims = [dims] if isinstance(dims, int) else dims
    gone = [d % max(1, ndim) for d in dims] if dims else list(range(ndim))
    keep = bool(argument(node, 2, False))
    left = [d for d in range(ndim) if d not in gone]
    return gone, {d: d if keep else i for i, d in enumerate(left)}


def _reduction(partial: str | None, *, linear: bool = False) -> RuleFunction:
    def rule(node: fx.Node) -> list[Rule]:
        gone, kept = _reduced(node)
        outs = len(_present(node))
        rules = [replicated(outs, 1), *(Rule((shard(b),) * outs, (shard(a),)) for a, b in kept.items())]
        if partial is not None:
            rules += [Rule((partial,), (shard(d),), filled=partial != PARTIAL) for d in gone]
        if linear:
            rules.append(Rule((PARTIAL,), (PARTIAL,)))
        return rules

    return rule


def _full_reduction(partial: str | None) -> RuleFunction:
    def rule(node: fx.Node) -> list[Rule]:
        ndim = value_of(tensor_args(node)[0]).dim()
        rules = [replicated(1, 1)]
        if partial is not None:
            rules += [Rule((partial,), (shard(d),), filled=True) for d in range(ndim)]
        return rules

    return rule


def _along(position: int, *, linear: bool = False) -> RuleFunction:
    """An op that works along one dim, args[position], and keeps the others; every output has the dims of the input."""

    def rule(node: fx.Node) -> list[Rule]:
        inputs, present = tensor_args(node), _present(node)
        ndim = value_of(inputs[0]).dim()
        dim = argument(node, position, node.kwargs.get("dim", -1))
        links: list[Link] = [((d,) * len(present), (d,) * len(inputs)) for d in range(ndim) if d != dim % max(1, ndim)]
        rules = from_links(links, present, len(inputs))
        return [*rules, Rule((PARTIAL,), (PARTIAL,))] if linear else rules

    return rule


def _stable_sort(node: fx.Node) -> list[Rule]:
    dim: Any = node.kwargs.get("dim", argument(node, 2, -1))
    ndim = value_of(tensor_args(node)[0]).dim()
    links: list[Link] = [((d, d), (d,)) for d in range(ndim) if d != dim % max(1, ndim)]
    return from_links(links, [True, True], 1)


def _softmax(position: int) -> RuleFunction:
    """Softmax family: other dims run apart; along the dim itself maximum and sum are reduced over the axis."""

    def rule(node: fx.Node) -> list[Rule]:
        rules = _along(position)(node)
        inputs = tensor_args(node)
        ndim = value_of(inputs[0]).dim()
        if ndim:
            split = shard(argument(node, position) % ndim)
            rules.append(Rule((split,), (split,) * len(inputs), local="sharded_softmax"))
        return rules

    return rule


def _layer_norm(node: fx.Node) -> list[Rule]:
    inputs = tensor_args(node)
    lead = value_of(inputs[0]).dim() - len(argument(node, 1))
    links: list[Link] = [((d, d, d), (d, *(None for _ in inputs[1:]))) for d in range(lead)]
    return from_links(links, [True] * 3, len(inputs))


def _layer_norm_backward(node: fx.Node) -> list[Rule]:
    inputs, present = tensor_args(node), _present(node)
    lead = value_of(inputs[1]).dim() - len(argument(node, 2))
    rules = [replicated(3, len(inputs), present)]
    for d in range(lead):
        outs = tuple(None if not here else shard(d) if i == 0 else PARTIAL for i, here in enumerate(present))
        rules.append(Rule(outs, (shard(d),) * 4 + (REPLICATE,) * (len(inputs) - 4)))
    return rules


def _embedding(node: fx.Node) -> list[Rule]:
    weight, index = tensor_args(node)
    lead = value_of(index).dim()
    links: list[Link] = [*(((d,), (None, d)) for d in range(lead)), ((lead,), (1, None))]
    rules = from_links(links, [True], 2)
    rules.append(Rule((PARTIAL,), (PARTIAL, REPLICATE)))
    return [*rules, Rule((PARTIAL,), (shard(0), REPLICATE), local="sharded_rows")]


def _embedding_backward(node: fx.Node) -> list[Rule]:
    grad, index = tensor_args(node)
    lead = value_of(index).dim()
    links: list[Link] = [((1,), (lead, None))]
    if not argument(node, 4, False):  # scaled by how often an index occurs in the whole
        links += [((None,), (d, d)) for d in range(lead)]
    rules = from_links(links, [True], 2)
    rules.append(Rule((PARTIAL,), (PARTIAL, REPLICATE)))
    return [*rules, Rule((shard(0),), (REPLICATE, REPLICATE), local="sharded_rows")]


def _index_positions(node: fx.Node, at: int) -> tuple[list[fx.Node | None], list[int], int, int]:
    """Indices of an advanced indexing, dims of x left alone, number of index dims, where they stand in the result."""
    x = value_of(argument(node, 0))
    indices = list(argument(node, at))
    indices += [None] * (x.dim() - len(indices))
    used = [d for d, index in enumerate(indices) if index is not None]
    width = max(value_of(i).dim() for i in indices if i is not None)
    together = used == list(range(used[0], used[-1] + 1))
    return indices, [d for d in range(x.dim()) if d not in used], width, used[0] if together else 0


def _index(node: fx.Node) -> list[Rule]:
    indices, free, width, start = _index_positions(node, 1)
    given = [i for i in indices if i is not None]
    if any(value_of(i).dtype.is_floating_point or str(value_of(i).dtype) == "torch.bool" for i in given):
        return [replicated(1, 1 + len(given))]
    before = [d for d in free if d < start] if start else []
    after = [d for d in free if d not in before]
    position = {d: d for d in before} | {d: len(before) + width + i for i, d in enumerate(after)}
    links: list[Link] = [((position[d],), (d, *(None for _ in given))) for d in free]
    for k in range(width):
        links.append(((start + k,), (None, *(_broadcast(i, k, width) for i in given))))
    rules = from_links(links, [True], 1 + len(given))
    return [*rules, Rule((PARTIAL,), (PARTIAL, *(REPLICATE for _ in given)))]


def _broadcast(node: fx.Node, dim: int, width: int) -> int | None:
    shape = value_of(node).shape
    here = dim - (width - len(shape))
    return here if here >= 0 and shape[here] != 1 else None


def _index_put(node: fx.Node) -> list[Rule]:
    indices, free, width, start = _index_positions(node, 1)
    given = [i for i in indices if i is not None]
    x, values = value_of(argument(node, 0)), value_of(argument(node, 2))
    inputs = 2 + len(given)
    rules = [replicated(1, inputs)]
    if any(str(value_of(i).dtype) == "torch.bool" for i in given):
        return rules
    before = [d for d in free if d < start] if start else []
    full = len(free) + width
    for i, d in enumerate(free):
        slot = d if d in before else width + i
        there = slot - (full - values.dim())
        split = there >= 0 and values.shape[there] == x.shape[d] and x.shape[d] != 1
        if split or there < 0 or values.shape[there] == 1:
            source = shard(there) if split else REPLICATE
            rules.append(Rule((shard(d),), (shard(d), *(REPLICATE for _ in given), source)))
    if argument(node, 3, False):
        rules.append(Rule((PARTIAL,), (PARTIAL, *(REPLICATE for _ in given), PARTIAL)))
        for k in range(width):
            there = start + k - (full - values.dim())
            places = [_broadcast(i, k, width) for i in given]
            if there >= 0 and values.shape[there] != 1 and all(p is not None for p in places):
                rules.append(Rule((PARTIAL,), (PARTIAL, *(shard(p) for p in places if p is not None), shard(there))))
    return rules


def _gather(node: fx.Node) -> list[Rule]:
    x, index = (value_of(n) for n in tensor_args(node))
    dim = argument(node, 1) % max(1, x.dim())
    links: list[Link] = [((d,), (d, d)) for d in range(x.dim()) if d != dim and x.shape[d] == index.shape[d]]
    if x.dim() == index.dim() and x.dim():
        links.append(((dim,), (None, dim)))
    rules = [*from_links(links, [True], 2), Rule((PARTIAL,), (PARTIAL, REPLICATE))]
    return [*rules, Rule((PARTIAL,), (shard(dim), REPLICATE), local="sharded_gather")] if x.dim() else rules


def _scatter(accumulate: bool) -> RuleFunction:
    def rule(node: fx.Node) -> list[Rule]:
        inputs = tensor_args(node)
        x, index = value_of(inputs[0]), value_of(inputs[1])
        dim, with_source = argument(node, 1) % max(1, x.dim()), len(inputs) > 2
        same = [d for d in range(x.dim()) if d != dim and x.shape[d] == index.shape[d]]
        if with_source:
            same = [d for d in same if value_of(inputs[2]).shape[d] == index.shape[d]]
        rules = from_links([((d,), (d,) * len(inputs)) for d in same], [True], len(inputs))
        if accumulate:
            rules.append(Rule((PARTIAL,), (PARTIAL, REPLICATE, PARTIAL)))
            if x.dim() and value_of(inputs[2]).shape == index.shape:
                rules.append(Rule((PARTIAL,), (PARTIAL, shard(dim), shard(dim))))
        elif not with_source and x.dim():
            rules.append(Rule((shard(dim),), (shard(dim), REPLICATE), local="sharded_scatter"))
        return rules

    return rule


def _index_add(node: fx.Node) -> list[Rule]:
    x = value_of(argument(node, 0))
    dim = argument(node, 1) % max(1, x.dim())
    rules = from_links([((d,), (d, None, d)) for d in range(x.dim()) if d != dim], [True], 3)
    return [*rules, Rule((PARTIAL,), (PARTIAL, REPLICATE, PARTIAL)), Rule((PARTIAL,), (PARTIAL, shard(0), shard(dim)))]


def _index_select(node: fx.Node) -> list[Rule]:
    x = value_of(argument(node, 0))
    dim = argument(node, 1) % max(1, x.dim())
    links: list[Link] = [*(((d,), (d, None)) for d in range(x.dim()) if d != dim), ((dim,), (None, 0))]
    return [*from_links(links, [True], 2), Rule((PARTIAL,), (PARTIAL, REPLICATE))]


def _grouped_product(node: fx.Node) -> list[Rule]:
    """(rows, k) by (groups, k, n), rows grouped by offsets: k is contracted, n runs apart."""
    return from_links([((None,), (1, 1, None)), ((1,), (None, 2, None))], [True], 3)


def _grouped_product_backward(node: fx.Node) -> list[Rule]:
    """Rows (m, k), weights (groups, k, n), offsets and the gradient (m, n) to the gradients of rows and weights."""
    return [
        replicated(2, 4),
        Rule((shard(1), shard(1)), (shard(1), shard(1), REPLICATE, REPLICATE)),
        Rule((PARTIAL, shard(2)), (REPLICATE, shard(2), REPLICATE, shard(1))),
    ]


def _embedding_bag(node: fx.Node) -> list[Rule]:
    """Features run apart; so do the indices of the largest rows, which only mode max (2) has."""
    inputs, present = tensor_args(node), _present(node)
    largest = 1 if argument(node, 4, 0) == 2 else None
    features: Link = ((1, None, None, largest), (1, *(None for _ in inputs[1:])))
    return from_links([features], present, len(inputs))


def _embedding_bag_backward(node: fx.Node) -> list[Rule]:
    inputs, given = tensor_args(node), named_arguments(node)
    dims: list[int | None] = [1, *(None for _ in inputs[1:])]
    if given["mode"] == 2:
        dims[inputs.index(given["maximum_indices"])] = 1
    return from_links([((1,), dims)], [True], len(inputs))


def _scatter_reduce(node: fx.Node) -> list[Rule]:
    """Reductions into places along one dim: the other dims run apart."""
    x, index, source = (value_of(n) for n in tensor_args(node))
    dim = argument(node, 1) % max(1, x.dim())
    same = [d for d in range(x.dim()) if d != dim and x.shape[d] == index.shape[d] == source.shape[d]]
    return from_links([((d,), (d,) * 3) for d in same], [True], 3)


def _searchsorted(node: fx.Node) -> list[Rule]:
    """Values (..., m) in sequences (..., n) that run with them, or in one (n) for all; a sorter runs with those."""
    inputs = tensor_args(node)
    sequence, out = value_of(inputs[0]), value_of(node)
    many = sequence.dim() > 1
    dims = out.dim() - 1 if many else out.dim()
    rest = len(inputs) - 2
    links: list[Link] = [((d,), (d if many else None, d, *((d if many else None,) * rest))) for d in range(dims)]
    if many:
        links.append(((dims,), (None, dims, *((None,) * rest))))
    return from_links(links if len(inputs) > 1 else [], [True], len(inputs))


def _cdist(node: fx.Node) -> list[Rule]:
    """Distances (..., p, r) of rows (..., p, m) and (..., r, m)."""
    x, y = (value_of(n) for n in tensor_args(node))
    lead = value_of(node).dim() - 2
    links: list[Link] = [((lead,), (x.dim() - 2, None)), ((lead + 1,), (None, y.dim() - 2))]
    links += [((d,), (d, d)) for d in range(lead) if x.dim() == y.dim() and x.shape[d] == y.shape[d]]
    return from_links(links, [True], 2)


def _cdist_backward(node: fx.Node) -> list[Rule]:
    """Gradients of x (..., p, m) for those of the distances (..., p, r), and y (..., r, m)."""
    grad, x, y, _ = (value_of(n) for n in tensor_args(node))
    lead = grad.dim() - 2
    if not x.dim() == y.dim() == grad.dim():
        return [replicated(1, 4)]
    links: list[Link] = [((d,), (d,) * 4) for d in range(lead) if x.shape[d] == y.shape[d] == grad.shape[d]]
    links += [((lead,), (lead, lead, None, lead)), ((None,), (lead + 1, None, lead, lead + 1))]
    return from_links(links, [True], 4)


MATH_RULES: dict[str, RuleFunction] = {
    "einsum": _einsum,
    "bmm": _matmul("bmk,bkn->bmn"),
    "sum": _reduction(PARTIAL, linear=True),
    "amax": _reduction("P(max)"),
    "amin": _reduction("P(min)"),
    "prod.dim_int": _reduction(None),
    "any.dim": _reduction(None),
    "any.dims": _reduction(None),
    "all.dim": _reduction(None),
    "argmax": _reduction(None),
    "argmin": _reduction(None),
    "max.dim": _reduction(None),
    "min.dim": _reduction(None),
    "median.dim": _reduction(None),
    "max.default": _full_reduction("P(max)"),
    "min.default": _full_reduction("P(min)"),
    "prod.default": _full_reduction(None),
    "any.default": _full_reduction(None),
    "all.default": _full_reduction(None),
    "cumsum": _along(1, linear=True),
    "cumprod": _along(1),
    "cummax": _along(1),
    "cummin": _along(1),
    "logcumsumexp": _along(1),
    "sort.default": _along(1),
    "sort.stable": _stable_sort,
    "topk": _along(2),
    "_softmax": _softmax(1),
    "_log_softmax": _softmax(1),
    "_safe_softmax": _along(1),
    "_softmax_backward_data": _softmax(2),
    "_log_softmax_backward_data": _softmax(2),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "transformers.grouped_mm_fallback": _grouped_product,
    "transformers.grouped_mm_fallback_backward": _grouped_product_backward,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_backward": _embedding_bag_backward,
    "index": _index,
    "_unsafe_index": _index,
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    "gather": _gather,
    "scatter.src": _scatter(False),
    "scatter.value": _scatter(False),
    "scatter_add": _scatter(True),
    "index_add": _index_add,
    "index_select": _index_select,
    "scatter_reduce": _scatter_reduce,
    "searchsorted": _searchsorted,
    "_cdist_forward": _cdist,
    "_cdist_backward": _cdist_backward,
}

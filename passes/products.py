"""Matrix products folded over the real dims of their operands, so that each of these can be sharded through them.

A linear layer flattens [batch, sequence, features] to rows before its product. A flattened [batch * sequence] dim can
be split by batch only; an einsum over the dims before flattening can be split by either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .graph import argument, arguments, emit, replace, value_of

__all__ = ["fold_flat_ops", "fold_products", "merge_permutes", "merge_reshapes"]

aten = torch.ops.aten
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_PERMUTES = {aten.permute.default, aten.t.default, aten.transpose.int}
_ROWWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Letters of the dims of each operand and of the result.
_PRODUCTS = {aten.mm.default: ("mk", "kn", "mn"), aten.bmm.default: ("bmk", "bkn", "bmn")}


def merge_permutes(graph: fx.Graph) -> None:
    """t and transpose become permute; a permute of a permute becomes one, or nothing."""
    for node in list(graph.nodes):
        order = _order(node)
        if order is None:
            continue
        first = x = argument(node, 0)
        while (inner := _order(x)) is not None:
            order, x = [inner[d] for d in order], argument(x, 0)
        if order == list(range(len(order))):
            replace(node, x)
        elif node.target is not aten.permute.default or x is not first:
            replace(node, emit(graph, node, aten.permute.default, (x, order), node))


def _order(node: fx.Node) -> list[int] | None:
    """The dim order of a permutation node, None for another node."""
    if node.target not in _PERMUTES:
        return None
    ndim = value_of(node).dim()
    if node.target is aten.permute.default:
        return [d % ndim for d in argument(node, 1)]
    order = list(range(ndim))
    if node.target is aten.t.default:
        return order[::-1]
    a, b = argument(node, 1) % ndim, argument(node, 2) % ndim
    order[a], order[b] = b, a
    return order


# An operand as seen through its views: the base tensor and, for each of its dims, its role: the operand dim that it is
# part of, then its place among the parts.
_Role = tuple[int, ...]
_Operand = tuple[fx.Node, list[_Role]]


def _unflatten(node: fx.Node, splittable: Sequence[bool]) -> _Operand:
    """Look through permutes and flattening views of an operand as long as only `splittable` dims are split."""
    roles: list[_Role] = [(d,) for d in range(value_of(node).dim())]
    while True:
        order = _order(node)
        if order is not None:
            inner: list[_Role] = [()] * len(order)
            for position, dim in enumerate(order):
                inner[dim] = roles[position]
            node, roles = argument(node, 0), inner
            continue
        parts = _flattened(node)
        if parts is None or any(len(part) != 1 and not splittable[roles[d][0]] for d, part in enumerate(parts)):
            return node, roles
        roles = [(*roles[d], place) for d, part in enumerate(parts) for place, _ in enumerate(part)]
        node = argument(node, 0)


def _flattened(node: fx.Node) -> list[list[int]] | None:
    """For a reshape that only merges dims: the input dims in each output dim. None for any other node."""
    if node.target not in _RESHAPES:
        return None
    before, after = list(value_of(argument(node, 0)).shape), list(value_of(node).shape)
    if 0 in before or not after:
        return None
    parts: list[list[int]] = []
    at = 0
    for size in after:
        part: list[int] = []
        product = 1
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


def fold_products(graph: fx.Graph) -> None:
    """mm and bmm of flattened operands become an einsum over the dims before flattening."""
    for node in list(graph.nodes):
        labels = _PRODUCTS.get(node.target)
        folded = _fold(node, *labels) if labels is not None else None
        if folded is not None:
            replace(node, folded)


def _fold(node: fx.Node, left: str, right: str, result: str) -> fx.Node | None:
    """`node` as an einsum over the dims that its operands had; None where nothing is gained."""
    operands = _operands(node, left, right)
    if operands is None:
        return None
    (a, a_roles), (b, b_roles) = operands
    if (a, b) == node.args and node.target is aten.bmm.default:
        return None
    letters, names = iter(_LETTERS), {}
    for label in dict.fromkeys((*result, *left)):
        parts = _sizes(a, a_roles, left, label) or _sizes(b, b_roles, right, label)
        names[label] = [next(letters) for _ in parts]
    output = "".join("".join(names[label]) for label in result)
    equation = f"{_spell(a_roles, left, names)},{_spell(b_roles, right, names)}->{output}"
    product = emit(node.graph, node, aten.einsum.default, (equation, [a, b]), node)
    if value_of(product).shape == value_of(node).shape:
        return product
    return emit(node.graph, node, aten.reshape.default, (product, list(value_of(node).shape)), node)


def _operands(node: fx.Node, left: str, right: str) -> tuple[_Operand, _Operand] | None:
    """Both operands seen through their views, with the same parts of the dims that they share."""
    shared = [label for label in left if label in right]
    for free in ({*left, *right}, {*left, *right} - {*shared}):
        a, b = (
            _unflatten(operand, [label in free for label in labels])
            for operand, labels in zip(arguments(node), (left, right), strict=True)
        )
        if all(_sizes(*a, left, label) == _sizes(*b, right, label) for label in shared):
            return a, b
    return None


def _sizes(node: fx.Node, roles: Sequence[_Role], labels: str, label: str) -> list[int]:
    """Sizes of the parts of the operand dim called `label`, in the order in which they were flattened."""
    parts = sorted(
        (role, size) for role, size in zip(roles, value_of(node).shape, strict=True) if labels[role[0]] == label
    )
    return [size for _, size in parts]


def _spell(roles: Sequence[_Role], labels: str, names: dict[str, list[str]]) -> str:
    """Letters of the dims of an operand: the parts of a dim are lettered in the order in which they were flattened."""
    ranks = {role: sorted(r for r in roles if labels[r[0]] == labels[role[0]]).index(role) for role in roles}
    return "".join(names[labels[role[0]]][ranks[role]] for role in roles)


def fold_flat_ops(graph: fx.Graph) -> None:
    """A bias added to flattened rows is added before flattening; a sum over flattened rows runs over the real dims."""
    for node in list(graph.nodes):
        flat = argument(node, 0)
        parts = _flattened(flat) if node.op == "call_function" and isinstance(flat, fx.Node) else None
        if parts is None or len(parts) != 2 or len(parts[1]) != 1:
            continue
        x = argument(flat, 0)
        if _is_bias(node, flat):
            wide = emit(graph, node, node.target, (x, *node.args[1:]), node, dict(node.kwargs))
        elif node.target is aten.sum.dim_IntList and _over_rows(node):
            wide = emit(graph, node, aten.sum.dim_IntList, (x, parts[0], *node.args[2:]), node)
        else:
            continue
        shape = list(value_of(node).shape)
        if list(value_of(wide).shape) != shape:
            wide = emit(graph, node, aten.reshape.default, (wide, shape), node)
        replace(node, wide)


def _is_bias(node: fx.Node, rows: fx.Node) -> bool:
    """Whether `node` adds to each row, or multiplies each by, the same vector."""
    other = argument(node, 1)
    if node.target not in _ROWWISE or not isinstance(other, fx.Node) or value_of(other).dim() != 1:
        return False
    return value_of(node).shape[-1] == value_of(rows).shape[-1]


def _over_rows(node: fx.Node) -> bool:
    return [d % 2 for d in argument(node, 1) or ()] == [0] and not node.kwargs


def merge_reshapes(graph: fx.Graph) -> None:
    """A reshape of a reshape becomes one, or nothing; view becomes reshape."""
    for node in list(graph.nodes):
        if node.target not in _RESHAPES:
            continue
        first = x = argument(node, 0)
        while x.target in _RESHAPES:
            x = argument(x, 0)
        shape = list(value_of(node).shape)
        if list(value_of(x).shape) == shape:
            replace(node, x)
        elif x is not first or node.target is not aten.reshape.default:
            replace(node, emit(graph, node, aten.reshape.default, (x, shape), node))

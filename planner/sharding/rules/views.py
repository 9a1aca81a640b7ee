"""Rules of ops that move or select elements without computing: reshapes, permutations, slices, pads, concatenations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ....passes.graph import argument, tensor_args, value_of, values_of
from ....plans.layouts import PARTIAL, REPLICATE, shard
from .rule import Link, Rule, RuleFunction, from_links, replicated

__all__ = ["VIEW_RULES", "aligned_dims"]


def aligned_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Dims of a reshape that may be split together: (dim before, dim after, whether only evenly).

    The sizes are cut into the smallest groups of equal product; within a group only the leading dims (of size over 1)
    correspond, and they do so exactly when the group is one dim on each side.
    """
    pairs = []
    i = j = 0
    while i < len(before) and j < len(after):
        a, b, p, q = [i], [j], before[i], after[j]
        i, j = i + 1, j + 1
        while p != q:
            if p < q and i < len(before):
                p *= before[i]
                a.append(i)
                i += 1
            elif q < p and j < len(after):
                q *= after[j]
                b.append(j)
                j += 1
            else:
                return pairs
        a, b = [d for d in a if before[d] != 1], [d for d in b if after[d] != 1]
        if a and b:
            pairs.append((a[0], b[0], len(a) != 1 or len(b) != 1))
    return pairs


def _linear_view(pairs: Sequence[tuple[int, int, bool]]) -> list[Rule]:
    rules = [Rule((REPLICATE,), (REPLICATE,)), Rule((PARTIAL,), (PARTIAL,))]
    return rules + [Rule((shard(b),), (shard(a),), even=even) for a, b, even in pairs]


def _reshape(node: fx.Node) -> list[Rule]:
    before, after = value_of(tensor_args(node)[0]).shape, value_of(node).shape
    if 0 in before:
        return _linear_view([])
    return _linear_view(aligned_dims(before, after))


def _permute(node: fx.Node) -> list[Rule]:
    ndim = value_of(node).dim()
    return _linear_view([(d % ndim, i, False) for i, d in enumerate(argument(node, 1))])


def _expand(node: fx.Node) -> list[Rule]:
    x, out = value_of(tensor_args(node)[0]), value_of(node)
    lead = out.dim() - x.dim()
    rules = _linear_view([(d, d + lead, False) for d in range(x.dim()) if x.shape[d] == out.shape[d + lead] != 1])
    new = [d for d in range(out.dim()) if d < lead or (x.shape[d - lead] == 1 != out.shape[d])]
    return rules + [Rule((shard(d),), (REPLICATE,)) for d in new]


def _keep_other_dims(node: fx.Node, dims: Sequence[int]) -> list[Rule]:
    """An op that touches only `dims` of its first input; other tensor inputs have the same dims."""
    inputs, out = tensor_args(node), value_of(node)
    touched = {d % max(1, out.dim()) for d in dims}
    links: list[Link] = [((d,), (d,) * len(inputs)) for d in range(out.dim()) if d not in touched]
    rules = from_links(links, [True], len(inputs))
    return [*rules, Rule((PARTIAL,), (PARTIAL,) * len(inputs))]


def _slice(node: fx.Node) -> list[Rule]:
    x, out = value_of(tensor_args(node)[0]), value_of(node)
    dim = argument(node, 1, 0) % x.dim()
    return _keep_other_dims(node, [] if x.shape == out.shape else [dim])


def _select(node: fx.Node) -> list[Rule]:
    x = value_of(tensor_args(node)[0])
    dim = argument(node, 1) % x.dim()
    return _linear_view([(d, d - (d > dim), False) for d in range(x.dim()) if d != dim])


def _slice_scatter(node: fx.Node) -> list[Rule]:
    return _keep_other_dims(node, [argument(node, 2, 0)])


def _select_scatter(node: fx.Node) -> list[Rule]:
    out = value_of(node)
    dim = argument(node, 2) % out.dim()
    links: list[Link] = [((d,), (d, d - (d > dim))) for d in range(out.dim()) if d != dim]
    return [*from_links(links, [True], 2), Rule((PARTIAL,), (PARTIAL, PARTIAL))]


def _pad(node: fx.Node) -> list[Rule]:
    ndim, pads = value_of(node).dim(), argument(node, 1)
    touched = [ndim - 1 - i // 2 for i, n in enumerate(pads) if n != 0]
    rules = _keep_other_dims(node, touched)
    return rules if argument(node, 2, 0) == 0 else rules[:-1]


def _cat(node: fx.Node) -> list[Rule]:
    if any(value_of(n).dim() != value_of(node).dim() for n in tensor_args(node)):  # legacy empty tensors
        return [replicated(1, len(tensor_args(node)))]
    return _keep_other_dims(node, [argument(node, 1, 0)])


def _flip(node: fx.Node) -> list[Rule]:
    return _keep_other_dims(node, argument(node, 1))


def _repeat(node: fx.Node) -> list[Rule]:
    x, times = value_of(tensor_args(node)[0]), argument(node, 1)
    lead = len(times) - x.dim()
    pairs = [(d, d + lead, False) for d in range(x.dim()) if times[d + lead] == 1 and x.shape[d] != 1]
    return _linear_view(pairs)


def _unfold(node: fx.Node) -> list[Rule]:
    x = value_of(tensor_args(node)[0])
    dim = argument(node, 1) % x.dim()
    return _linear_view([(d, d, False) for d in range(x.dim()) if d != dim])


def _diagonal(node: fx.Node) -> list[Rule]:
    x = value_of(tensor_args(node)[0])
    a, b = argument(node, 2, 0) % x.dim(), argument(node, 3, 1) % x.dim()
    rest = [d for d in range(x.dim()) if d not in (a, b)]
    return _linear_view([(d, i, False) for i, d in enumerate(rest)])


def _as_real(node: fx.Node) -> list[Rule]:
    ndim = value_of(tensor_args(node)[0]).dim()
    return _linear_view([(d, d, False) for d in range(ndim)])


def _as_complex(node: fx.Node) -> list[Rule]:
    ndim = value_of(node).dim()
    return _linear_view([(d, d, False) for d in range(ndim)])


def _full(node: fx.Node) -> list[Rule]:
    """A constant tensor: every piece of it can be made where it is needed."""
    out, inputs = value_of(node), len(tensor_args(node))
    plain = (REPLICATE,) * inputs
    split = range(out.dim()) if out.numel() else ()
    return [Rule((REPLICATE,), plain), *(Rule((shard(d),), plain) for d in split)]


def _everywhere(node: fx.Node) -> list[Rule]:
    return [replicated(len(values_of(node)), len(tensor_args(node)))]


VIEW_RULES: dict[str, RuleFunction] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "unsqueeze": _reshape,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "constant_pad_nd": _pad,
    "cat": _cat,
    "flip": _flip,
    "repeat": _repeat,
    "unfold": _unfold,
    "diagonal": _diagonal,
    "view_as_real": _as_real,
    "view_as_complex": _as_complex,
    "full": _full,
    "arange": _everywhere,
    "linspace": _everywhere,
    "scalar_tensor": _everywhere,
    "eye": _everywhere,
    "nonzero": _everywhere,
    "repeat_interleave": _everywhere,
    "_unique2": _everywhere,
    "_ctc_loss": _everywhere,
    "_ctc_loss_backward": _everywhere,
}

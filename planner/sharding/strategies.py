"""Strategies: for each node of a program, the layouts it can run in on a mesh.

Along one axis the rules come from our own tables where local execution needs more than DTensor knows (uneven shards,
einsum, sharded vocabularies, CPU attention) and from DTensor's registries otherwise; on an N-dimensional mesh a
strategy is one rule per axis, kept when no view regroups uneven pieces and no kernel meets an empty piece that it
refuses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ...passes.graph import tensor_args, value_of, values_of
from ...passes.keeping import is_keep
from ...passes.naming import draws_random, op_name
from ...plans.errors import UnsupportedOpError
from ...plans.layouts import PARTIAL, REPLICATE, Layout, Placement, is_partial, pieces, shard_dim
from ...plans.marks import KEPT
from ...plans.meshes import Mesh
from .. import _torch
from .regions import region_layouts
from .rules.linear import LINEAR_RULES
from .rules.math import MATH_RULES
from .rules.rule import Link, Rule, RuleFunction, from_links, replicated
from .rules.spatial import SPATIAL_RULES
from .rules.views import VIEW_RULES

__all__ = ["EXTREMES", "OWN_RULES", "WHOLE", "Strategies", "Strategy", "op_key", "rule_name", "shardable", "split_dims"]

OWN_RULES: dict[str, RuleFunction] = {**VIEW_RULES, **MATH_RULES, **SPATIAL_RULES, **LINEAR_RULES}

# Partial results that some reductions make and no step between layouts does.
EXTREMES = ("P(max)", "P(min)")
# Elementwise ops that PyTorch does not tag as such.
_ELEMENTWISE = {
    "softplus_backward",
    "log_sigmoid_forward",
    "log_sigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardsigmoid_backward",
    "elu_backward",
    "leaky_relu_backward",
    "mish_backward",
    "hardtanh_backward",
    "logit_backward",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "rrelu_with_noise_backward",
    "softshrink_backward",
    "celu_backward",
    "polar",
    "complex",
    "where",
    "bucketize",
    "floor_divide",
    "fill",
}

# Devices up to which every layout is offered, also those that leave most devices without elements.
FEW = 8

# Ops of DTensor's rules that complain of empty pieces.
_FILLED = ("prims.var", "upsample", "_upsample", "max_unpool")

# How the local program is called of an op that runs whole on every device for want of a rule.
WHOLE = "whole"
# Ops that reach other processes.
_ACROSS = ("_c10d_functional", "c10d", "_dtensor", "symm_mem")

# Elementwise ops that DTensor takes to keep a maximum, which they do for some of their arguments only.
_NOT_MONOTONIC = {"threshold"}


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a node: a layout per output (None where it has no tensor) and per tensor input.

    `local` names the local program when it is not the op itself on local pieces.
    """

    outs: tuple[Layout | None, ...]
    ins: tuple[Layout, ...]
    local: str = ""


def shardable(shape: Sequence[int], layout: Layout, mesh: Sequence[int], *, wide: bool = False) -> bool:
    """Whether the search looks at a tensor of `shape` (elements) in `layout`.

    A split dim must be there, and have several elements unless the tensor has one in all. Devices may be left without
    elements, as torch.chunk leaves them; on many devices fewer than half of the pieces along a dim may be empty: the
    same is had on fewer axes. `wide` lifts these limits, for what a user asks for.
    """
    if any(d is not None and d >= len(shape) for d in map(shard_dim, layout)):
        return False
    dims = split_dims(shape, wide=wide)
    many = math.prod(mesh) > FEW and not wide
    for dim, size in enumerate(shape):
        sizes = pieces(size, dim, layout, mesh)
        if len(sizes) > 1 and size and (dim not in dims or (many and 2 * sizes.count(0) >= len(sizes))):
            return False
    return True


class Strategies:
    """Strategies of the nodes of one program on one mesh; equal ops on equal shapes are worked out once.

    Tensors of the shapes in `wide` are looked at in every layout that there is.
    """

    def __init__(
        self, mesh: Mesh, *, replicate: Sequence[str] = (), wide: Collection[tuple[int, ...]] = frozenset()
    ) -> None:
        self.mesh, self.wide = mesh, wide
        self.replicate = frozenset(replicate)
        self._rules: dict[Any, list[Rule]] = {}
        self._strategies: dict[Any, list[Strategy]] = {}
        self._shardable: dict[tuple[tuple[int, ...], Layout], bool] = {}

    def of(self, node: fx.Node, name: str = "", *, extremes: Sequence[bool] | None = None) -> list[Strategy]:
        """Every strategy of `node`: one of the local program WHOLE where its op has no rule. UnsupportedOpError for one
        that communicates.

        `extremes` says of each tensor input whether it can lie as partial maxima or minima, which some ops make and no
        step does; by default all can.
        """
        twins: tuple[fx.Node, ...] = node.meta.get("twins", ())
        can = None if extremes is None else tuple(extremes)
        key = (op_key(node), can, *map(op_key, twins))
        if key not in self._strategies:
            if is_keep(node):
                found = self._of_keep(node)
            else:
                found = self._of_region(node) if "region" in node.meta else self._compose(node, name, can)
            self._strategies[key] = [s for s in found if all(self.holds(twin, s, name) for twin in twins)]
        return self._strategies[key]

    def holds(self, node: fx.Node, strategy: Strategy, name: str = "") -> bool:
        """Whether `strategy` computes what `node` computes, though perhaps of pieces that no search would look at."""
        if "region" in node.meta:
            return strategy in self._of_region(node)
        if is_keep(node):
            return strategy in self._of_keep(node)
        per_axis = []
        for axis, parts in enumerate(self.mesh.shape):
            outs = tuple(None if layout is None else layout[axis] for layout in strategy.outs)
            ins = tuple(layout[axis] for layout in strategy.ins)
            per_axis.append([r for r in self._along(node, parts, name) if (r.outs, r.ins) == (outs, ins)])
        pairs = _paired(node, strategy)
        return any(
            next((r.local for r in rules if r.local), "") == strategy.local and self._sound(rules, pairs)
            for rules in itertools.product(*per_axis)
        )

    def _of_region(self, node: fx.Node) -> list[Strategy]:
        """The placements that the user gave a region, and no others."""
        given = enumerate(region_layouts(node, self.mesh))
        return [Strategy(outs, ins, f"region:{at}") for at, (outs, ins) in given]

    def _of_keep(self, node: fx.Node) -> list[Strategy]:
        """How a parameter may lie between forward and backward: in any layout, for readers that gather for themselves,
        or gathered along an axis, once for all of them. The two differ in what the gathers hide behind (hiding.py)."""
        layouts = self.of_tensor(value_of(node).shape)
        axes = [axis for axis, parts in enumerate(self.mesh.shape) if parts > 1]
        gathered = [layout for layout in layouts if any(layout[axis] == REPLICATE for axis in axes)]
        return [*(Strategy((x,), (x,)) for x in layouts), *(Strategy((x,), (x,), KEPT) for x in gathered)]

    def of_tensor(self, shape: Sequence[int], *, partial: bool = False) -> list[Layout]:
        """Every layout in which a parameter, buffer or input of `shape` (elements) can be held."""
        wide = tuple(shape) in self.wide
        one = ["R", *(f"S({d})" for d in split_dims(shape, wide=wide)), *(["P(sum)"] if partial else [])]
        per_axis = [one if parts > 1 else ["R"] for parts in self.mesh.shape]
        layouts = itertools.product(*per_axis)
        return [layout for layout in layouts if shardable(shape, layout, self.mesh.shape, wide=wide)]

    def _compose(self, node: fx.Node, name: str, extremes: Sequence[bool] | None) -> list[Strategy]:
        per_axis = [self._along(node, parts, name) for parts in self.mesh.shape]
        if extremes is not None:
            per_axis = [
                [r for r in rules if all(can or p not in EXTREMES for can, p in zip(extremes, r.ins, strict=True))]
                for rules in per_axis
            ]
        inputs = range(len(tensor_args(node)))
        found: dict[Strategy, None] = {}
        for rules in itertools.product(*per_axis):
            outs = tuple(_across(placements) for placements in zip(*(r.outs for r in rules), strict=True))
            ins = tuple(tuple(r.ins[i] for r in rules) for i in inputs)
            strategy = Strategy(outs, ins, next((r.local for r in rules if r.local), ""))
            pairs = _paired(node, strategy)
            if self._searched(pairs) and self._sound(rules, pairs):
                found.setdefault(strategy)
        return list(found)

    def _searched(self, pairs: Sequence[tuple[Layout, torch.Tensor]]) -> bool:
        """Whether the search looks at every tensor in its layout."""
        return all(self._looked_at(tuple(v.shape), layout) for layout, v in pairs)

    def _looked_at(self, shape: tuple[int, ...], layout: Layout) -> bool:
        key = (shape, layout)
        if key not in self._shardable:
            self._shardable[key] = shardable(shape, layout, self.mesh.shape, wide=shape in self.wide)
        return self._shardable[key]

    def _sound(self, rules: Sequence[Rule], pairs: Sequence[tuple[Layout, torch.Tensor]]) -> bool:
        """Whether a choice of one rule per axis makes sense: one kind of reduction, one special local program, and even
        or filled pieces where a rule needs them. `pairs` are the layouts that it gives to tensors."""
        for layout, value in pairs:
            pending = {p for p in layout if is_partial(p)}
            if len(pending) > 1 or (pending and value.dtype == torch.bool):
                return False
        if len({r.local for r in rules if r.local}) > 1:
            return False
        return all(self._cut_well(layout, value.shape, rules) for layout, value in pairs)

    def _cut_well(self, layout: Layout, shape: Sequence[int], rules: Sequence[Rule]) -> bool:
        """Whether pieces of a dim split under an `even` rule are equal, and those under a `filled` one not empty."""
        for rule, placement in zip(rules, layout, strict=True):
            dim = shard_dim(placement)
            if dim is None or not (rule.even or rule.filled):
                continue
            sizes = pieces(shape[dim], dim, layout, self.mesh.shape)
            if (rule.even and len(set(sizes)) > 1) or (rule.filled and shape[dim] and 0 in sizes):
                return False
        return True

    def _along(self, node: fx.Node, parts: int, name: str) -> list[Rule]:
        inputs, outputs = tensor_args(node), values_of(node)
        everywhere = replicated(len(outputs), len(inputs), [v is not None for v in outputs])
        if parts == 1:
            return [everywhere]
        key = (op_key(node), parts)
        if key not in self._rules:
            raw = self._raw(node, parts, everywhere, name)
            whole = [dataclasses.replace(everywhere, local=WHOLE)]
            self._rules[key] = whole if raw is None else self._checked(node, everywhere, raw)
        return self._rules[key]

    def _raw(self, node: fx.Node, parts: int, everywhere: Rule, name: str) -> list[Rule] | None:
        """The rules of an op before they are fitted to its tensors: ours, else DTensor's, else those of its kind; None
        where it has none, or the user wants it whole."""
        short = op_name(node)
        if short in self.replicate or str(node.target) in self.replicate:
            return None
        if draws_random(node):
            return [everywhere]
        if "rule" in node.meta:
            return node.meta["rule"].rules(node)
        own = rule_name(node)
        if own is not None:
            return OWN_RULES[own](node)
        if not tensor_args(node):
            return [everywhere]
        raw = _dtensor(node, parts)
        if raw is not None and short not in _NOT_MONOTONIC:
            return [dataclasses.replace(rule, filled=True) for rule in raw] if short.startswith(_FILLED) else raw
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or short in _ELEMENTWISE:
            return _pointwise(node)
        if short.startswith(_ACROSS):
            raise UnsupportedOpError(
                f"'model' must not communicate by itself, got {_torch.spelled(node.target)} at {name or node.name}; "
                "write the region for pieces and give it to local_map (docs/custom-ops.md)"
            )
        return None

    def _checked(self, node: fx.Node, everywhere: Rule, rules: Sequence[Rule]) -> list[Rule]:
        """Rules that fit the node's tensors, without repeats, the replicated one first."""
        outs, ins = values_of(node), [values_of(n)[0] for n in tensor_args(node)]
        kept = {everywhere: None}
        for rule in rules:
            if len(rule.outs) != len(outs) or len(rule.ins) != len(ins):
                continue
            pairs = zip((*rule.outs, *rule.ins), (*outs, *ins), strict=True)
            if not _rounds(rule, outs, ins) and all(_fits(p, v) for p, v in pairs):
                kept.setdefault(rule)
        return list(kept)


def split_dims(shape: Sequence[int], *, wide: bool = False) -> list[int]:
    """Dims of a tensor of `shape` (elements) that can be split: those of several elements, or the first of a tensor of
    one element; when `wide` any with an element."""
    several = [d for d, n in enumerate(shape) if n > (0 if wide else 1)]
    return several or ([0] if shape and math.prod(shape) == 1 else [])


def rule_name(node: fx.Node) -> str | None:
    """The entry of OWN_RULES for the op of `node`, by overload first; None where there is none."""
    short = op_name(node)
    names = (f"{short}.{_torch.overload_of(node.target)}", short)
    return next((name for name in names if name in OWN_RULES), None)


def _dtensor(node: fx.Node, parts: int) -> list[Rule] | None:
    """DTensor's rules on an axis of `parts` devices; None where it has none."""
    if not _torch.is_aten(node.target):
        return None
    held: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = held
    count = len(values_of(node))
    rows = _torch.dtensor_rules(node.target, args, kwargs, count, parts)
    if rows is None:
        return None
    rules = []
    for row in rows:
        ins = tuple(p for p in row[count:] if p is not None)
        if count + len(ins) == len(row):
            rules.append(Rule(tuple(row[:count]), ins))
    return rules


def _paired(node: fx.Node, strategy: Strategy) -> list[tuple[Layout, torch.Tensor]]:
    """The layouts of a strategy with the tensors that they are for."""
    values = (*values_of(node), *(value_of(n) for n in tensor_args(node)))
    layouts = (*strategy.outs, *strategy.ins)
    return [(o, v) for o, v in zip(layouts, values, strict=True) if o is not None and v is not None]


def _across(placements: Sequence[Placement | None]) -> Layout | None:
    """A layout of one placement per axis; None where there is no tensor."""
    layout = tuple(p for p in placements if p is not None)
    return layout if len(layout) == len(placements) else None


def _pointwise(node: fx.Node) -> list[Rule]:
    """Every dim of the output runs apart; inputs broadcast along the dims that they lack."""
    out, ins = values_of(node)[0], [values_of(n)[0] for n in tensor_args(node)]
    assert out is not None

    def dim_of(value: torch.Tensor | None, dim: int) -> int | None:
        here = dim - (out.dim() - value.dim()) if value is not None else -1
        return here if value is not None and here >= 0 and value.shape[here] != 1 else None

    present = [v is not None and v.shape == out.shape for v in values_of(node)]
    links: list[Link] = [((d,) * len(present), tuple(dim_of(v, d) for v in ins)) for d in range(out.dim())]
    return from_links(links, [v is not None for v in values_of(node)], len(ins)) if all(present) else []


def _rounds(rule: Rule, outs: Sequence[Any], ins: Sequence[Any]) -> bool:
    """Whether a partial sum of real numbers would be rounded to integers term by term."""

    def real(value: torch.Tensor) -> bool:
        return value.is_floating_point() or value.is_complex()

    real_in = any(is_partial(p) and real(v) for p, v in zip(rule.ins, ins, strict=True))
    return real_in and any(p and is_partial(p) and not real(v) for p, v in zip(rule.outs, outs, strict=True))


def _fits(placement: str | None, value: torch.Tensor | None) -> bool:
    """Whether a tensor can lie so: a dim with something to split, a sum or an extreme that its dtype has."""
    if placement is None or value is None:
        return placement is None and value is None
    dim = shard_dim(placement)
    if is_partial(placement) and (value.dtype == torch.bool or (value.is_complex() and placement != PARTIAL)):
        return False
    return dim is None or (dim < value.dim() and value.shape[dim] > 1)


def op_key(node: fx.Node) -> Any:
    """Equal for nodes with the same op, tensor shapes and dtypes, and other arguments."""

    def part(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return tuple((tuple(v.shape), v.dtype) if v is not None else None for v in values_of(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(part, value))
        if isinstance(value, dict):
            return tuple((k, part(v)) for k, v in value.items())
        return (type(value).__name__, str(value))

    given = node.meta.get("rule")
    return (node.target, part(node.args), part(node.kwargs), tuple(v is not None for v in values_of(node)), given)

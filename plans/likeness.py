"""Which recipe a plan is like: how each weight is used and stored along each axis, put against what recipes ask for.

A product of the forward uses its weight along an axis in one of these ways, which its layouts show:

    weight   other operand   output     the axis splits
    whole    split           split      the data: batch or sequence
    split    whole           split      the outputs of the product
    split    split           partial    its contracted inputs (or, of a looked-up table, its rows)
    split    split           split      experts
    whole    whole           whole      nothing

The way that most of the products' time goes is the way of the axis; weights that go another way are exceptions. Where
data is split, a parameter is stored whole (ddp) or split, the most bytes decide; of the split ones most are gathered
for each half of the step (fsdp) or once (zero2, or zero1 where gradients stay whole to the end of the backward).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from .layouts import is_partial, shard_dim
from .marks import KEEP, LATE
from .recipes import recipe_name
from .words import axis_words, dtype_bytes

if TYPE_CHECKING:
    from .plan import Edge, Node, Plan, Tensor

__all__ = ["Departure", "Likeness", "likeness"]

How = Literal["data", "outputs", "inputs", "experts", "nothing"]
# Ops that multiply by a weight or look it up, and those that only change its looks.
_PRODUCTS = {"einsum", "bmm", "mm", "addmm", "convolution", "embedding", "_grouped_mm"}
_LOOKS = {"permute", "reshape", "_to_copy", "expand", "alias"}
_WORDS: dict[How, str] = {
    "data": "used whole on split data",
    "outputs": "used with its outputs split",
    "inputs": "used with its inputs split",
    "experts": "used with its experts split",
    "nothing": "used whole on whole data",
}
# More than this part of the products' time has to go one way.
_MOST = 0.5
# The ways that split the batch, by how parameters are stored.
_STORED = ("ddp", "fsdp", "zero1", "zero2")
_SHOWN = 6


class Departure(Struct, frozen=True, kw_only=True):
    """A parameter that goes another way than its axis."""

    name: str
    axis: str
    words: str

    def __str__(self) -> str:
        return f"{self.name} is {self.words} over {self.axis}"


class Likeness(Struct, frozen=True, kw_only=True):
    """The recipe that a plan is like: a way per axis of more than one device, None where it is like none there, and
    what goes another way. `name` is empty where an axis has no way."""

    axes: tuple[str, ...]
    ways: tuple[str | None, ...]
    exceptions: tuple[Departure, ...]

    @property
    def name(self) -> str:
        """The recipe's usual name: hsdp, fsdp+tp."""
        return "" if None in self.ways else recipe_name(tuple(way for way in self.ways if way))

    def __str__(self) -> str:
        if not self.ways:
            return "one device"
        parts = [f"{way or 'no named way'} over {axis}" for way, axis in zip(self.ways, self.axes, strict=True)]
        text = ", ".join(parts) if not self.name or len(parts) == 1 else f"{self.name}: {', '.join(parts)}"
        found = [str(e) for e in self.exceptions[:_SHOWN]]
        more = len(self.exceptions) - len(found)
        return text + (f"; except: {'; '.join(found)}" if found else "") + (f"; and {more} more" if more else "")


def likeness(plan: Plan) -> Likeness:
    """The recipe that `plan` is like."""
    axes = [axis for axis, parts in enumerate(plan.mesh.shape) if parts > 1]
    uses = list(_uses(plan))
    found = [_way(plan, axis, uses) for axis in axes]
    return Likeness(
        axes=tuple(axis_words(plan.mesh)[axis] for axis in axes),
        ways=tuple(way for way, _ in found),
        exceptions=tuple(e for _, exceptions in found for e in exceptions),
    )


class _Use(Struct, frozen=True, kw_only=True):
    """A product, its parameter, and the input edges of the weight and of the other operand."""

    node: Node
    parameter: Tensor
    weight: Edge
    operand: Edge

    @property
    def seconds(self) -> float:
        return self.node.time_s * self.node.count

    def how(self, axis: int) -> How:
        """How the product uses its weight along an axis."""
        out, weight, operand = (x[axis] for x in (self.node.outputs[0], self.weight.layout, self.operand.layout))  # type: ignore[index]
        if shard_dim(weight) is None:
            return "nothing" if shard_dim(out) is None and shard_dim(operand) is None else "data"
        if is_partial(out):
            return "inputs"
        return "outputs" if shard_dim(operand) is None else "experts"


def _uses(plan: Plan) -> Iterator[_Use]:
    """The products of the forward by a parameter."""
    parameters = {tensor.name: tensor for tensor in plan.parameters}
    looks = {node.name: node.inputs[0].source for node in plan.nodes if node.op in _LOOKS and len(node.inputs) == 1}

    def root(name: str) -> Tensor | None:
        while name in looks and name not in parameters:
            name = looks[name]
        return parameters.get(name)

    counted = _counted(plan)
    for node in plan.nodes:
        if node.op not in _PRODUCTS or "::bwd." in node.name or len(node.inputs) < 2:
            continue
        held = [edge for edge in node.inputs if (tensor := root(edge.source)) is not None and len(tensor.shape) > 1]
        others = [e for e in node.inputs if root(e.source) is None and e.layout and e.source not in counted]
        if held and others and node.outputs[0] is not None:
            parameter = root(held[0].source)
            assert parameter is not None
            yield _Use(node=node, parameter=parameter, weight=held[0], operand=others[0])


def _counted(plan: Plan) -> set[str]:
    """Names of what is made of nothing but constants and buffers, as positions are: it is not split with the data."""
    found = {tensor.name for tensor in plan.buffers}
    while True:
        more = {n.name for n in plan.nodes if n.name not in found and all(e.source in found for e in n.inputs)}
        if not more:
            return found
        found |= more


def _way(plan: Plan, axis: int, uses: list[_Use]) -> tuple[str | None, list[Departure]]:
    """The way of an axis, and what goes another way."""
    time: defaultdict[How, float] = defaultdict(float)
    for use in uses:
        time[use.how(axis)] += use.seconds
    whole = sum(time.values())
    tensor, data = time["outputs"] + time["inputs"], time["data"]
    if not whole:
        return None, []
    if tensor > _MOST * whole:
        way, fits = ("tp-sp" if _gathers_tokens(plan, axis, uses) else "tp"), ("outputs", "inputs")
    elif time["experts"] and data + time["experts"] > _MOST * whole:
        way, fits = "ep", ("data", "experts")
    elif data > _MOST * whole:
        way = "cp" if _splits_sequence(plan, axis, uses) else _storing(plan, axis)
        fits = ("data",)
    else:
        return None, []
    name = plan.mesh.axis_names[axis]
    odd = {use.parameter.name: _WORDS[use.how(axis)] for use in uses if use.how(axis) not in fits}
    kept = _kept(plan, axis) if way in _STORED else {}
    for tensor_ in plan.parameters if way in _STORED else ():
        split = shard_dim(tensor_.layout[axis]) is not None
        if split != (way != "ddp") and any(n >= plan.mesh.shape[axis] for n in tensor_.shape):
            odd.setdefault(tensor_.name, "stored split" if split else "stored whole")
        elif split and kept.get(tensor_.name, way != "fsdp") != (way != "fsdp"):
            odd.setdefault(tensor_.name, "gathered once" if way == "fsdp" else "gathered anew in the backward")
    return way, [Departure(name=n, axis=name, words=words) for n, words in odd.items()]


def _gathers_tokens(plan: Plan, axis: int, uses: list[_Use]) -> bool:
    """Whether products with split outputs mostly gather their operand: it rests split."""
    split = [use for use in uses if use.how(axis) == "outputs"]
    lead = f"all_gather({plan.mesh.axis_names[axis]},"
    gathered = [use for use in split if any(step.startswith(lead) for step in use.operand.steps)]
    return 2 * len(gathered) > len(split)


def _splits_sequence(plan: Plan, axis: int, uses: list[_Use]) -> bool:
    """Whether attention is split over the queries, or, where there is none, products over a dim after the batch."""
    attention = [n for n in plan.nodes if "scaled_dot_product" in n.op and "::bwd." not in n.name and n.outputs[0]]
    if attention:
        return any(n.outputs[0] is not None and n.outputs[0][axis] == "S(2)" for n in attention)
    dims = [use.node.outputs[0][axis] for use in uses if use.node.op == "einsum" and use.how(axis) == "data"]  # type: ignore[index]
    return 2 * dims.count("S(1)") > len(dims)


def _storing(plan: Plan, axis: int) -> str:
    """How most bytes of the parameters are stored along an axis, and most of those split gathered."""
    size: Counter[str] = Counter()
    kept = _kept(plan, axis)
    for tensor in plan.parameters:
        what = "split" if shard_dim(tensor.layout[axis]) is not None else "whole"
        if what == "split" and tensor.name in kept:
            size["kept" if kept[tensor.name] else "anew"] += _bytes(plan, tensor)
        size[what] += _bytes(plan, tensor)
    if size["split"] <= size["whole"]:
        return "ddp"
    if size["kept"] <= size["anew"]:
        return "fsdp"
    pipeline = plan.pipeline
    if pipeline is not None and pipeline.microbatches > 1:
        return "zero1" if pipeline.reduce_gradients == "step" else "zero2"
    return "zero1" if any(node.op == "gradient" and node.rule == LATE for node in plan.nodes) else "zero2"


def _kept(plan: Plan, axis: int) -> dict[str, bool]:
    """Parameters that both halves of the step read, and whether they are whole along an axis from one to the other."""
    nodes = {node.name: node for node in plan.nodes}
    found = ((t.name, nodes.get(t.name + KEEP)) for t in plan.parameters)
    return {name: shard_dim(node.outputs[0][axis]) is None for name, node in found if node and node.outputs[0]}


def _bytes(plan: Plan, tensor: Tensor) -> int:
    return plan.copies(tensor.name) * math.prod(tensor.shape) * dtype_bytes(tensor.dtype)

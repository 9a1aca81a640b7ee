"""Which recipe a plan is like: how each weight is used and stored along each axis, put against what recipes ask for.

A product of the forward uses its weight along an axis in one of these ways, which its layouts show:

    weight   other operand   output     the axis splits
    whole    split           split      the data: batch or sequence
    split    whole           split      the outputs of the product
    split    split           partial    its contracted inputs (or, of a looked-up table, its rows)
    split    split           split      experts
    whole    whole           whole      nothing

The way that most of the products' time goes is the way of the axis; weights that go another way are exceptions. Where
data is split, a parameter is stored whole (ddp) or split (fsdp), the most bytes decide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from .layouts import is_partial, shard_dim
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
        way = "cp" if _splits_sequence(plan, axis, uses) else "fsdp" if _stores_split(plan, axis) else "ddp"
        fits = ("data",)
    else:
        return None, []
    name = plan.mesh.axis_names[axis]
    odd = {use.parameter.name: _WORDS[use.how(axis)] for use in uses if use.how(axis) not in fits}
    for tensor_ in plan.parameters if way in ("ddp", "fsdp") else ():
        split = shard_dim(tensor_.layout[axis]) is not None
        if split != (way == "fsdp") and any(n >= plan.mesh.shape[axis] for n in tensor_.shape):
            odd.setdefault(tensor_.name, "stored split" if split else "stored whole")
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


def _stores_split(plan: Plan, axis: int) -> bool:
    """Whether most bytes of the parameters are split along an axis."""
    size = {True: 0, False: 0}
    for tensor in plan.parameters:
        split = shard_dim(tensor.layout[axis]) is not None
        size[split] += plan.copies(tensor.name) * math.prod(tensor.shape) * dtype_bytes(tensor.dtype)
    return size[True] > size[False]

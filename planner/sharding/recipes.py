"""From a recipe to constraints on a captured model: where parameters lie, what products give, where values rest.

What is constrained, per mesh axis (everything else is solved):

    ddp     parameters whole; inputs split over the batch; products give their part of the batch
    fsdp    likewise, but parameters split, along whichever dim, and held so between the forward and the backward
    zero2   likewise, but parameters gathered whole between the forward and the backward
    zero1   as zero2, and gradients made as sums that are pending: that they are reduced when the backward is done is
            asked of the step (Accumulation.late)
    cp      products, and attention where it gathers, give their part of the sequence
    ep      weights of experts and what products with them give split over the experts; the rest as in ddp, but with
            the other parameters left open
    tp      weights of pairs, of looked-up tables and of a head over the vocabulary split (roles.py), their
            products' outputs too; parameters that no product reads whole; values between pairs whole
    tp-sp   likewise, with the values between pairs split over the tokens

Axes are worked out one by one, those of ddp, fsdp, zero1, zero2 and ep together as far as the batch goes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import fx

from ...passes.graph import Captured, value_of, values_of
from ...passes.keeping import is_keep
from ...passes.naming import op_name
from ...plans.errors import RequestError
from ...plans.layouts import PARTIAL, REPLICATE, Placement, chunk_sizes, shard, shard_dim
from ...plans.recipes import Recipe
from .constraints import SPLIT, Constraint
from .flows import Program, Spread
from .roles import Roles, find_roles

__all__ = ["recipe_constraints"]


def recipe_constraints(recipe: Recipe, captured: Captured, *, replicate: Sequence[str] = ()) -> dict[str, Constraint]:
    """What `recipe` asks of the tensors and nodes of `captured`, by their names in the whole model.

    Raises RequestError when the model has nothing that a way of the recipe could split.
    """
    return _Writer(recipe, captured, tuple(replicate)).run()


class _Writer:
    def __init__(self, recipe: Recipe, captured: Captured, replicate: tuple[str, ...]) -> None:
        self.recipe, self.captured, self.replicate = recipe, captured, replicate
        self.mesh = recipe.mesh
        self.programs: dict[int, Program] = {}
        self.found: defaultdict[fx.Node, dict[int, Placement]] = defaultdict(dict)
        self.parameters = [n for n, s in captured.sources.items() if s.kind == "parameter"]

    def run(self) -> dict[str, Constraint]:
        over_batch = self.recipe.axes("ddp", "fsdp", "zero1", "zero2", "ep")
        if over_batch:
            self._batch(over_batch)
        for axis in self.recipe.axes("cp"):
            self._sequence(axis)
        for axis in self.recipe.axes("tp", "tp-sp"):
            self._tensor(axis)
        names = ((self.captured.names[node], pins) for node, pins in self.found.items())
        return {
            name: Constraint(name=name, layout=tuple(pins.get(axis) for axis in range(self.mesh.ndim)))
            for name, pins in names
        }

    def _program(self, parts: int) -> Program:
        if parts not in self.programs:
            self.programs[parts] = Program.of(self.captured, parts, self.replicate)
        return self.programs[parts]

    def _pin(self, node: fx.Node, axis: int, placement: Placement) -> None:
        self.found[node][axis] = placement

    def _refuse(self, way: str, why: str) -> RequestError:
        return RequestError(f"'recipe' must fit the model, got {self.recipe}: {way} {why}; take another recipe or mesh")

    # -- ways --------------------------------------------------------------------------------------------------------

    def _batch(self, axes: list[int]) -> None:
        """Pins of the ways that split the batch."""
        parts = math.prod(self.mesh.shape[axis] for axis in axes)
        seeds = batch_inputs(self.captured)
        short = [n for n in seeds if 0 in chunk_sizes(value_of(n).shape[0], parts)]
        if not seeds or short:
            ways = " and ".join(dict.fromkeys(str(self.recipe.ways[axis]) for axis in axes))
            what = f"{self.captured.names[short[0]]} has {_shape(short[0])[0]}" if short else "no input has one"
            raise self._refuse(ways, f"splits the batch {parts}-fold, {what}")
        program = self._program(parts)
        spread = program.spread(dict.fromkeys(seeds, shard(0)))
        for axis in axes:
            way = self.recipe.ways[axis]
            # There may be fewer experts than parts of the batch: the axis of ep alone splits them.
            alone = self._program(self.mesh.shape[axis]).products if way == "ep" else {}
            experts = {n: uses[0] for n, p in alone.items() if (uses := p.of("experts"))}
            for node in seeds:
                self._pin(node, axis, shard(0))
            for node in program.products:
                if shard_dim(spread.of(node)) is not None and not (way == "ep" and node in experts):
                    self._pin(node, axis, spread.of(node))
            if way == "ep":
                if not experts:
                    raise self._refuse("ep", "needs products with a batch of weights, one per expert, and found none")
                for node, use in experts.items():
                    self._pin(node, axis, use.out)
                    self._pin(alone[node].weight, axis, use.weight)
                continue
            for node in self.parameters:
                between = [user for user in node.users if is_keep(user)]
                if way == "ddp":
                    pins = {node: REPLICATE, **dict.fromkeys(between, REPLICATE)}
                elif any(0 not in chunk_sizes(n, self.mesh.shape[axis]) for n in value_of(node).shape):
                    pins = {node: SPLIT, **dict.fromkeys(between, SPLIT if way == "fsdp" else REPLICATE)}
                else:
                    pins = {}
                made = self.captured.grads.get(self.captured.sources[node].name)
                if way == "zero1" and pins and made is not None and self._sums(program, made):
                    pins[made] = PARTIAL
                for held, placement in pins.items():
                    self._pin(held, axis, placement)

    def _sums(self, program: Program, node: fx.Node) -> bool:
        """Whether an op can leave a sum over the devices of an axis pending."""
        return op_name(node) != "getitem" and any(s.outs[0] == (PARTIAL,) for s in program.options(node))

    def _sequence(self, axis: int) -> None:
        """Pins of context parallelism."""
        program = self._program(self.mesh.shape[axis])
        first = next((n for n in batch_inputs(self.captured) if value_of(n).dim() > 1), None)
        long = [n for n in batch_inputs(self.captured) if first is not None and _alike(n, first)]
        spread = program.spread(dict.fromkeys(long, shard(1)), gather=True)
        places = {n: spread.of(n) for n in (*program.products, *spread.gathers) if shard_dim(spread.of(n)) is not None}
        # An input without a sequence (an image) is cut into one inside: the dim of tokens that is not the batch.
        if not places:
            seeds = _tokens(program, program.spread(dict.fromkeys(batch_inputs(self.captured), shard(0))))
            spread = program.spread(seeds, gather=True)
            places = seeds | {n: spread.of(n) for n in spread.gathers}
        if not places:
            raise self._refuse("cp", "needs products over a sequence, and found none")
        for node, placement in places.items():
            self._pin(node, axis, placement)

    def _tensor(self, axis: int) -> None:
        """Pins of tensor parallelism."""
        parts, way = self.mesh.shape[axis], self.recipe.ways[axis]
        program = self._program(parts)
        roles = find_roles(program)
        if not roles.pairs:
            raise self._refuse(
                str(way), f"needs pairs of weight products that can be split {parts}-fold, outputs then inputs; none is"
            )
        for node in self.parameters:
            if node not in roles.open:
                self._pin(node, axis, roles.weights.get(node, REPLICATE))
        for node, placement in roles.outs.items():
            self._pin(node, axis, placement)
        stream = _stream(roles)
        batch = program.spread(dict.fromkeys(batch_inputs(self.captured), shard(0)))
        for node in roles.rests:
            if way == "tp":
                self._pin(node, axis, REPLICATE)
            elif _shape(node) == stream and (dim := _token_dim(batch, node, parts)) is not None:
                self._pin(node, axis, shard(dim))


def batch_inputs(captured: Captured) -> list[fx.Node]:
    """Inputs whose first dim is the batch: as long as that of the first input that has one."""
    inputs = [n for n, s in captured.sources.items() if s.kind == "input" and value_of(n).dim() > 0]
    return [n for n in inputs if value_of(n).shape[0] == value_of(inputs[0]).shape[0]]


def _alike(node: fx.Node, first: fx.Node) -> bool:
    """Whether `node` has the sequence that `first` has."""
    value = value_of(node)
    return value.dim() > 1 and value.shape[1] == value_of(first).shape[1]


def _tokens(program: Program, batch: Spread) -> dict[fx.Node, Placement]:
    """Products that run over a dim besides the batch, with their last such dim."""
    found: dict[fx.Node, Placement] = {}
    for node, product in program.products.items():
        dims = [use.out for use in product.of("data") if use.out != batch.of(node)]
        if dims and shard_dim(batch.of(node)) is not None:
            found[node] = dims[-1]
    return found


def _shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of the first output of `node`."""
    value = values_of(node)[0]
    return () if value is None else tuple(value.shape)


def _stream(roles: Roles) -> tuple[int, ...]:
    """The shape that most sums of pairs have: that of the values that travel from block to block."""
    shapes = Counter(_shape(n) for n, out in roles.outs.items() if shard_dim(out) is None)
    return shapes.most_common(1)[0][0]


def _token_dim(batch: Spread, node: fx.Node, parts: int) -> int | None:
    """The dim of the tokens, the last before the features, where it is not the batch and can be split."""
    dim = len(_shape(node)) - 2
    if dim < 0 or batch.of(node) == shard(dim) or 0 in chunk_sizes(_shape(node)[dim], parts):
        return None
    return dim

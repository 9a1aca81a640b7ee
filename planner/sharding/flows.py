"""What a split does to a program by itself: dims followed from op to op along one axis, without communication.

`Program` reads the forward of a captured step with the strategies of one axis. A tensor made of a parameter alone, by
views and casts, is *held*: it can be split as its reader likes. A *product* is an op whose rules contract a dim of a
held tensor with the other operand (or look its rows up) and also give it outputs of their own: matrix products,
convolutions, embeddings, experts in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from ...passes.graph import Captured, tensor_args, values_of
from ...passes.naming import op_name
from ...plans.layouts import PARTIAL, REPLICATE, Placement, is_partial, shard_dim
from ...plans.meshes import Mesh
from .strategies import Strategies, Strategy

__all__ = ["Kind", "Product", "Program", "Use"]

# How a product uses a weight along an axis: its outputs split, its contracted inputs split, rows of a table split, one
# weight per expert, or the weight whole and the other operand split.
Kind = Literal["outputs", "inputs", "rows", "experts", "data"]
_SAME = ("permute", "reshape", "_to_copy", "expand", "alias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One way to run a product along an axis: of the parameter, the other operand and the output, the placements."""

    kind: Kind
    weight: Placement
    operand: Placement
    out: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of the forward: its weight (a parameter's placeholder), the other operand, and how it can run."""

    node: fx.Node
    weight: fx.Node
    operand: fx.Node
    uses: tuple[Use, ...]

    def of(self, *kinds: Kind) -> list[Use]:
        """Its uses of some kinds."""
        return [use for use in self.uses if use.kind in kinds]


@dataclass(slots=True, kw_only=True, eq=False)
class Program:
    """The forward of a captured step along an axis of `parts` devices."""

    captured: Captured
    strategies: Strategies
    products: dict[fx.Node, Product] = field(default_factory=dict)
    _roots: dict[fx.Node, fx.Node | None] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: Captured, parts: int, replicate: tuple[str, ...] = ()) -> Program:
        """Read `captured`; ops named in `replicate` may have no rule."""
        program = cls(captured=captured, strategies=Strategies(Mesh((parts,), ("axis",)), replicate=replicate))
        for node in program.forward():
            product = program._product(node)
            if product is not None:
                program.products[node] = product
        return program

    def forward(self) -> list[fx.Node]:
        """The ops of the forward, in order."""
        return [n for n in self.captured.ops() if n not in self.captured.backward and op_name(n) != "getitem"]

    def parameter(self, node: fx.Node) -> fx.Node | None:
        """The parameter that `node` is, by views and casts; None where it is more than that."""
        if node not in self._roots:
            source = self.captured.sources.get(node)
            root = node if source is not None and source.kind == "parameter" else None
            if node.op == "call_function" and len(node.all_input_nodes) == 1 and op_name(node) in _SAME:
                root = self.parameter(node.all_input_nodes[0])
            self._roots[node] = root
        return self._roots[node]

    def at_parameter(self, node: fx.Node, placement: Placement) -> Placement | None:
        """How a parameter lies when the held tensor `node`, made of it, lies so; None where no way leads there."""
        while node.op == "call_function":
            found = [s.ins[0][0] for s in self.options(node) if s.outs[0] == (placement,)]
            if not found:
                return None
            node, placement = node.all_input_nodes[0], found[0]
        return placement

    def options(self, node: fx.Node) -> list[Strategy]:
        """The strategies of an op along the axis; a region that its user wrote for whole meshes is whole."""
        if "region" in node.meta:
            outs = tuple(None if v is None else (REPLICATE,) for v in values_of(node))
            return [Strategy(outs, ((REPLICATE,),) * len(tensor_args(node)))]
        return self.strategies.of(node, self.captured.names[node])

    def spread(self, sources: Mapping[fx.Node, Placement], *, gather: bool = False) -> Spread:
        """Where the placements of `sources`, inputs or ops, lead when weights are whole and nothing else moves.

        What meets no rule is whole. With `gather`, an op may take some of its inputs whole to keep the split of
        another.
        """
        spread = Spread()
        for node in self.captured.sources:
            spread.put(node, [sources.get(node, REPLICATE)])
        for node in self.forward():
            if node in sources:
                spread.put(node, [sources[node]])
                continue
            ins = [None if self.parameter(n) is not None else spread.of(n) for n in tensor_args(node)]
            best = min(self.options(node), key=lambda s: _misfit(s, ins, gather=gather))
            never, gathered, _ = _misfit(best, ins, gather=gather)
            spread.put(node, [REPLICATE if o is None or never else o[0] for o in best.outs])
            if gathered and shard_dim(spread.places[node][0]) is not None:
                spread.gathers.append(node)
        return spread

    def _product(self, node: fx.Node) -> Product | None:
        inputs = tensor_args(node)
        held = [at for at, n in enumerate(inputs) if self.parameter(n) is not None]
        others = [at for at, n in enumerate(inputs) if self.parameter(n) is None]
        if not held or not others:
            return None
        weight, operand = max(held, key=lambda at: _rank(inputs[at])), others[0]
        uses = tuple(
            dict.fromkeys(
                use
                for strategy in self.options(node)
                if (use := self._use(strategy, inputs[weight], weight, operand)) is not None
            )
        )
        kinds = {use.kind for use in uses}
        if "outputs" not in kinds or not kinds & {"inputs", "rows"}:
            return None
        root = self.parameter(inputs[weight])
        assert root is not None
        return Product(node=node, weight=root, operand=inputs[operand], uses=uses)

    def _use(self, strategy: Strategy, held: fx.Node, weight: int, operand: int) -> Use | None:
        out = strategy.outs[0]
        w, x = strategy.ins[weight][0], strategy.ins[operand][0]
        if out is None or is_partial(w) or is_partial(x) or (w == x == REPLICATE):
            return None
        kind: Kind
        if w == REPLICATE:
            kind = "data"
        elif out[0] == PARTIAL:
            kind = "rows" if x == REPLICATE else "inputs"
        else:
            kind = "outputs" if x == REPLICATE else "experts"
        lies = self.at_parameter(held, w)
        if lies is None or out[0] == REPLICATE or (kind == "data" and out[0] == PARTIAL):
            return None
        return Use(kind=kind, weight=lies, operand=x, out=out[0])


@dataclass(slots=True, kw_only=True, eq=False)
class Spread:
    """Placements of every value along an axis, and the ops that took a split input whole."""

    places: dict[fx.Node, list[Placement]] = field(default_factory=dict)
    gathers: list[fx.Node] = field(default_factory=list)

    def put(self, node: fx.Node, outs: list[Placement]) -> None:
        """Set the outputs of `node`."""
        self.places[node] = outs

    def of(self, node: fx.Node) -> Placement:
        """Where the value of `node` lies; an item of a tuple as the output that it is."""
        if node.op == "call_function" and op_name(node) == "getitem":
            base: fx.Node = node.args[0]  # type: ignore[assignment]
            index: int = node.args[1]  # type: ignore[assignment]
            return self.places.get(base, [REPLICATE] * (index + 1))[index]
        return self.places.get(node, [REPLICATE])[0]


def _misfit(strategy: Strategy, ins: Sequence[Placement | None], *, gather: bool) -> tuple[bool, int, int]:
    """How badly a strategy takes inputs that lie so (None: a parameter, whole): whether it cannot, how many splits it
    takes whole, how many other small moves it needs."""
    gathered = moves = 0
    for have, (want,) in zip(ins, strategy.ins, strict=True):
        if want == have or (have is None and want == REPLICATE):
            continue
        if have is not None and want == REPLICATE and (gather or is_partial(have)):
            gathered += not is_partial(have)
            moves += is_partial(have)
        elif have in (None, REPLICATE) and shard_dim(want) is not None:
            moves += 1
        else:
            return True, 0, 0
    return False, gathered, moves


def _rank(node: fx.Node) -> int:
    value = values_of(node)[0]
    return 0 if value is None else value.dim()

"""Tensor parallel roles, found by following what a split weight does.

A product whose outputs are split is worth it when the split is carried, op by op and without communication, until
other products contract it (a pair: outputs, then inputs), or until it ends in the loss (a head over the vocabulary).
A split that some op cannot carry, or that an inner reduction would need on all devices, makes no role: such products
are left open. A table that inputs of the model look up is split by its rows.

The partial sums that pairs end in are carried on as far as ops take them; where they are summed is a *rest*: there, and
where products take their input, values are whole (or split over the tokens, by sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from ...passes.graph import tensor_args, values_of
from ...passes.naming import op_name
from ...plans.layouts import PARTIAL, REPLICATE, Placement, shard_dim
from .flows import Product, Program, Use

__all__ = ["Roles", "find_roles"]

# A value, as a node and the number of its output.
Value = tuple[fx.Node, int]


@dataclass(slots=True, kw_only=True, eq=False)
class Roles:
    """Tensor parallelism of a program: how parameters lie (those in `open` as the solver likes, all others whole),
    where products leave their outputs, and the nodes whose values rest."""

    weights: dict[fx.Node, Placement] = field(default_factory=dict)
    outs: dict[fx.Node, Placement] = field(default_factory=dict)
    rests: dict[fx.Node, None] = field(default_factory=dict)
    open: set[fx.Node] = field(default_factory=set)
    pairs: int = 0

    def take(self, found: _Carried | dict[fx.Node, Placement], product: fx.Node, out: Placement) -> None:
        """Give `product` a role."""
        self.weights |= found.weights if isinstance(found, _Carried) else found
        self.outs[product] = out


@dataclass(slots=True, kw_only=True, eq=False)
class _Carried:
    """How far a split was followed: the parameters it fixes, the products that contract it, whether it ended well."""

    weights: dict[fx.Node, Placement] = field(default_factory=dict)
    ends: dict[fx.Node, Use] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)
    failed: bool = False


def find_roles(program: Program) -> Roles:
    """The tensor parallel roles of a program's products, in the order of the program."""
    roles = Roles()
    before_products = _before(program)
    for node, product in program.products.items():
        if node in roles.outs:
            continue
        rows = product.of("rows")
        if rows and _is_looked_up(product, program) and _agrees(roles, {product.weight: rows[0].weight}):
            roles.take({product.weight: rows[0].weight}, node, PARTIAL)
            continue
        for use in product.of("outputs"):
            found = _carry(program, product, use)
            found.failed = found.failed or any(n in before_products for n in found.sums)
            if found.failed or not (found.ends or found.sums) or not _agrees(roles, found.weights):
                continue
            roles.take(found, node, use.out)
            for end, how in found.ends.items():
                roles.take(found, end, how.out)
                roles.pairs += 1
            break
    roles.open = {p.weight for n, p in program.products.items() if n not in roles.outs and not p.of("rows")}
    roles.open -= set(roles.weights)
    _find_rests(program, roles)
    return roles


def _is_looked_up(product: Product, program: Program) -> bool:
    """Whether the rows that a table is asked for are given to the model, not counted by it (as positions are)."""
    stack, seen = [product.operand], set()
    while stack:
        node = stack.pop()
        source = program.captured.sources.get(node)
        if source is not None and source.kind == "input":
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False


def _agrees(roles: Roles, weights: dict[fx.Node, Placement]) -> bool:
    return all(roles.weights.get(weight, placement) == placement for weight, placement in weights.items())


def _before(program: Program) -> set[fx.Node]:
    """Nodes of the forward from which a product can be reached."""
    found: set[fx.Node] = set()
    stack = [n for node in program.products for n in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _carry(program: Program, product: Product, use: Use) -> _Carried:
    """Follow the split outputs of `product` as far as they go."""
    found = _Carried(weights={product.weight: use.weight})
    places: dict[Value, Placement] = {}
    stack: list[tuple[Value, Placement]] = [((product.node, 0), use.out)]
    while stack and not found.failed:
        value, placement = stack.pop()
        if places.setdefault(value, placement) != placement:
            found.failed = True
        elif placement == PARTIAL:
            found.sums.append(value[0])
        else:
            for reader, at in _readers(program, value):
                stack += _through(program, reader, at, placement, found)
    return found


def _readers(program: Program, value: Value) -> Iterator[tuple[fx.Node, int]]:
    """Ops of the forward that read a value, with the number of the input; the value leaving the model counts as one
    that reads it as input -1."""
    node, output = value
    for user in node.users:
        if user.op == "output":
            if any(node is n for n in program.captured.outputs):
                yield user, -1
        elif user in program.captured.backward:
            continue
        elif op_name(user) == "getitem":
            if user.args[1] == output:
                yield from _readers(program, (user, 0))
        else:
            yield from ((user, at) for at, n in enumerate(tensor_args(user)) if n is node)


def _through(
    program: Program, reader: fx.Node, at: int, placement: Placement, found: _Carried
) -> list[tuple[Value, Placement]]:
    """What `reader` makes of input `at` split so: a product that contracts it is an end, others hand it on."""
    if at < 0:
        found.failed = True
        return []
    product, inputs = program.products.get(reader), tensor_args(reader)
    if product is not None:
        ends = [u for u in product.of("inputs") if u.operand == placement and inputs[at] is product.operand]
        if ends:
            found.ends[reader] = ends[0]
            found.weights[product.weight] = ends[0].weight
            return []
    for strategy in program.options(reader):
        if strategy.ins[at] != (placement,) or any(o is not None and o[0] == REPLICATE for o in strategy.outs[:1]):
            continue
        held = {n: ins[0] for n, ins in zip(inputs, strategy.ins, strict=True) if program.parameter(n) is not None}
        for node, lies in held.items():
            own = program.at_parameter(node, lies)
            if own is None:
                break
            if shard_dim(own) is not None:
                found.weights[program.parameter(node)] = own  # type: ignore[index]
        else:
            outs = [(i, o[0]) for i, o in enumerate(strategy.outs) if o is not None]
            return [((reader, i), place) for i, place in outs if place != REPLICATE]
    found.failed = True
    return []


def _find_rests(program: Program, roles: Roles) -> None:
    """Where partial sums have to be summed, and what products with split outputs take in."""
    while True:
        partial, stops = _partial(program, roles)
        late = [n for n in partial if n not in roles.outs and _is_summed(program, n, partial | {*roles.rests})]
        if not late:
            break
        roles.rests |= dict.fromkeys(late)
    roles.rests |= stops
    for node, out in roles.outs.items():
        if shard_dim(out) is not None:
            made = program.products[node].operand
            while made.op == "call_function" and (
                op_name(made) in ("_to_copy", "reshape") or (op_name(made) == "getitem" and made.args[1] == 0)
            ):
                made = made.all_input_nodes[0]
            if made.op == "call_function" and made not in partial and op_name(made) != "getitem":
                roles.rests[made] = None


def _is_summed(program: Program, node: fx.Node, carrying: set[fx.Node]) -> bool:
    """Whether several ops read `node`, and one of them cannot take a partial sum."""
    readers = {reader for reader, at in _readers(program, (node, 0)) if at >= 0}
    return len(readers) > 1 and not readers <= carrying


def _partial(program: Program, roles: Roles) -> tuple[set[fx.Node], dict[fx.Node, None]]:
    """Values that are partial sums until they rest, and the ops that cannot hand such sums on."""
    partial = {n for n, out in roles.outs.items() if out == PARTIAL}
    stops: dict[fx.Node, None] = {}
    for node in program.forward():
        inputs = tensor_args(node)
        ins = [PARTIAL if n in partial else REPLICATE for n in inputs]
        if node in roles.outs or node in roles.rests or PARTIAL not in ins:
            continue
        carried = any([i[0] for i in s.ins] == ins and s.outs[0] == (PARTIAL,) for s in program.options(node))
        if carried and len(values_of(node)) == 1:
            partial.add(node)
        else:
            stops[node] = None
    return partial, stops

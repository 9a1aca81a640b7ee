"""The sharding problem of a captured program: nodes with strategies, costs of edges, memory over time, overlap.

One decision per class of nodes (folding.py), one cost matrix per pair of classes that exchange a tensor. A
value with several readers in a phase gets a *hub*, a decision of its own, so that one redistribution can serve them
all. The gather of a parameter can hide behind as much compute as its reader does, started that much ahead; the
reduction of a gradient behind as much as the op that made it. What does not fit there is exposed. (Ops of a model
that gather much also compute much, so that op by op or summed over the phase comes to the same; op by op it is a cost
of pairs and stays exact.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import fx

from ...cost_models.prices import Prices
from ...passes.graph import Captured, Source, tensor_args, values_of
from ...passes.keeping import is_keep
from ...passes.naming import op_name
from ...plans.layouts import Layout
from ...plans.meshes import Mesh
from ..solver.problem import Pair, Problem
from ..solver.ways import WRITTEN_OUT, Way
from .accumulation import Accumulation
from .constraints import Constraints
from .decisions import Decision, Formulation, Kind, Reading
from .folding import Blocks
from .hiding import behind_what, keeps
from .op_costs import Fusion, Local, op_seconds
from .strategies import EXTREMES, Strategies, Strategy
from .transitions import Transitions, TransitionTable

__all__ = ["formulate"]


def formulate(
    captured: Captured,
    mesh: Mesh,
    prices: Prices,
    *,
    blocks: Blocks,
    compiled: bool,
    optimizer_s: Callable[[np.ndarray], np.ndarray],
    constraints: Constraints | None = None,
    replicate: Sequence[str] = (),
    accumulation: Accumulation | None = None,
) -> Formulation:
    """Build the problem without memory rows. `optimizer_s` maps local parameter bytes to seconds of the update;
    ops named in `replicate` may run whole on every device where they have no rule. Of a step of several micro-batches
    (`accumulation`) the problem is that of one; what is done once in a step counts by its share."""
    return _Builder(
        captured,
        mesh,
        prices,
        blocks,
        compiled,
        optimizer_s,
        constraints or Constraints(),
        replicate,
        accumulation or Accumulation(),
    ).run()


class _Builder:
    def __init__(
        self,
        captured: Captured,
        mesh: Mesh,
        prices: Prices,
        blocks: Blocks,
        compiled: bool,
        optimizer_s: Callable,
        constraints: Constraints,
        replicate: Sequence[str],
        accumulation: Accumulation,
    ) -> None:
        self.accumulation = accumulation
        self.captured, self.mesh, self.prices, self.blocks = captured, mesh, prices, blocks
        self.optimizer_s, self.constraints = optimizer_s, constraints
        self.catalogue = Strategies(mesh, replicate=replicate, wide=constraints.wide)
        self.transitions = Transitions(mesh, prices, wide=constraints.wide)
        self.fusion = Fusion(captured, compiled=compiled, blocks=blocks)
        self.decisions: list[Decision] = []
        self.by_key: dict[object, int] = {}
        self.of: dict[fx.Node, int] = {}
        self.results: dict[str, int] = {}
        self.readings: list[Reading] = []
        self.grads: list[Reading] = []
        self.edges: dict[Pair, np.ndarray | Way] = {}
        self.hidden: dict[Pair, np.ndarray] = {}
        self.unary: dict[int, np.ndarray] = {}
        self.extreme: set[fx.Node] = set()
        self.parameters = {n for n, s in captured.sources.items() if s.kind == "parameter"}

    def run(self) -> Formulation:
        for node in self.captured.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._enter(node)
            elif node.op == "call_function" and op_name(node) != "getitem":
                self._op(node)
        self._hubs_and_readings()
        self._outputs()
        for decision in self.decisions:
            decision.seconds = self._seconds(decision)
        self._edge_costs()
        problem = Problem(
            names=tuple(d.pattern for d in self.decisions),
            nodes=tuple(self._node_costs(i) for i in range(len(self.decisions))),
            edges=self.edges,
        )
        return Formulation(
            captured=self.captured,
            mesh=self.mesh,
            prices=self.prices,
            transitions=self.transitions,
            decisions=self.decisions,
            of=self.of,
            results=self.results,
            readings=self.readings,
            problem=problem,
            fusion=self.fusion,
            blocks=self.blocks,
            grads=self.grads,
            hidden=self.hidden,
            accumulation=self.accumulation,
        )

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, key: object, name: str, make: Callable[[], Decision]) -> int:
        if key not in self.by_key:
            self.by_key[key] = len(self.decisions)
            self.decisions.append(make())
        index = self.by_key[key]
        self.decisions[index].members += 1
        self.decisions[index].weight += self.blocks.share(name)
        return index

    def _held(self, kind: Kind, name: str, node: fx.Node, layouts: Sequence[Layout]) -> Decision:
        """A decision over where one tensor lies; `name` is its own name, or its pattern once the constraints agree."""
        value = values_of(node)[0]
        assert value is not None
        kept = [layout for layout, ok in zip(layouts, self.constraints.allowed(name, layouts), strict=True) if ok]
        table = self.transitions.table(value.shape, value.element_size())
        states = np.array([table.index[layout] for layout in kept], dtype=np.int64)
        strategies = [Strategy((layout,), (layout,)) for layout in kept]
        return Decision(
            kind=kind,
            pattern=self.blocks.pattern(name),
            strategies=strategies,
            tables=[table],
            states=[states],
            node=node,
        )

    def _enter(self, node: fx.Node) -> None:
        value = values_of(node)[0]
        if value is None:
            return
        name = self.captured.names[node]
        source = self.captured.sources.get(node)
        everywhere = [("R",) * self.mesh.ndim]
        layouts = (
            self.catalogue.of_tensor(value.shape) if source is not None and not self._whole(source) else everywhere
        )
        pattern = self.blocks.pattern(name)
        origin = (source.kind, source.requires_grad) if source else None
        key = (
            "source",
            pattern,
            tuple(value.shape),
            value.dtype,
            origin,
            self.constraints.key(name),
        )
        kind: Kind = "source" if source is not None else "tangent"
        self.of[node] = self._decide(key, name, lambda: self._held(kind, name, node, layouts))

    def _whole(self, source: Source) -> bool:
        """Whether a tensor must be whole on every device: a constant, and an input that gets something back."""
        return (
            source.kind == "constant"
            or source.kind == "input"
            and (source.requires_grad or source.name in self.captured.mutations)
        )

    def _op(self, node: fx.Node) -> None:
        name = self.captured.names[node]
        strategies = self._strategies(node, name)
        pattern = self.blocks.pattern(name)
        key = (
            "op",
            pattern,
            id(strategies),
            node in self.captured.backward,
            self.constraints.key(name),
        )
        self.of[node] = self._decide(key, name, lambda: self._op_decision(node, name, strategies))

    def _strategies(self, node: fx.Node, name: str) -> list[Strategy]:
        """The strategies whose inputs can lie so."""
        can = [self._base(source)[0] in self.extreme for source in tensor_args(node)]
        strategies = self.catalogue.of(node, name, extremes=can)
        if any(layout is not None and extremes(layout) for s in strategies for layout in s.outs):
            self.extreme.add(node)
        return strategies

    def _op_decision(self, node: fx.Node, name: str, strategies: list[Strategy]) -> Decision:
        values = values_of(node)
        first = next((i for i, v in enumerate(values) if v is not None), None)
        if first is not None:
            allowed = self.constraints.allowed(name, [s.outs[first] or () for s in strategies])
            strategies = [s for s, ok in zip(strategies, allowed, strict=True) if ok]
        tables, states = [], []
        for index, value in enumerate(values):
            if value is None:
                tables.append(None)
                states.append(None)
                continue
            used = [s.outs[index] for s in strategies]
            wide = any(layout is not None and extremes(layout) for layout in used)
            table = self.transitions.table(value.shape, value.element_size(), extremes=wide)
            tables.append(table)
            states.append(np.array([table.index[layout] for layout in used], dtype=np.int64))  # type: ignore[index]
        return Decision(
            kind="op", pattern=self.blocks.pattern(name), strategies=strategies, tables=tables, states=states, node=node
        )

    # -- readings ----------------------------------------------------------------------------------------------------

    def _base(self, node: fx.Node) -> tuple[fx.Node, int]:
        if node.op == "call_function" and op_name(node) == "getitem":
            return node.args[0], node.args[1]  # type: ignore[return-value]
        return node, 0

    def _hubs_and_readings(self) -> None:
        uses: dict[tuple[fx.Node, int, bool], list[tuple[fx.Node, int]]] = defaultdict(list)
        for node in self.captured.ops():
            if op_name(node) == "getitem":
                continue
            for at, source in enumerate(tensor_args(node)):
                base, output = self._base(source)
                uses[base, output, node in self.captured.backward].append((node, at))
        for (base, output, backward), readers in uses.items():
            early = self._from_parameter(base)
            via = self._hub(base, output, backward) if len({n for n, _ in readers}) > 1 else None
            for node, at in readers:
                self.readings.append(
                    Reading(
                        source=self.of[base],
                        output=output,
                        via=via,
                        reader=self.of[node],
                        at=at,
                        node=node,
                        of=base,
                        backward=backward,
                        early=early,
                        behind=self.of[self._first_reader(node)],
                    )
                )

    def _first_reader(self, node: fx.Node) -> fx.Node:
        """The op that a kept parameter is first read by; any other node itself."""
        while is_keep(node):
            node = min(user for user in node.users if user.op == "call_function")
        return node

    def _hub(self, base: fx.Node, output: int, backward: bool) -> int:
        source = self.decisions[self.of[base]]
        table = source.tables[output]
        assert table is not None
        key = ("hub", self.of[base], output, backward)
        plain = [layout for layout in table.layouts]

        def make() -> Decision:
            states = np.arange(len(plain), dtype=np.int64)
            strategies = [Strategy((layout,), (layout,)) for layout in plain]
            label = f"{source.pattern}{f'#{output}' if output else ''} for {'backward' if backward else 'forward'}"
            return Decision(
                kind="hub", pattern=label, strategies=strategies, tables=[table], states=[states], node=base
            )

        return self._decide(key, self.captured.names[base], make)

    def _outputs(self) -> None:
        captured = self.captured
        everywhere = [("R",) * self.mesh.ndim]
        for index, node in enumerate(captured.outputs):
            if node is None:
                continue
            base, output = self._base(node)
            name = f"output.{index}"
            label = captured.output_tree.names[index]
            self.results[name] = self._decide(
                ("output", name), name, lambda n=node, t=label: self._held("output", t, n, everywhere)
            )
            self._result_reading(base, output, self.results[name], node, backward=False)
        where = {s.name: n for n, s in captured.sources.items()}
        for name, node in captured.mutations.items():
            base, output = self._base(node)
            self._result_reading(base, output, self.of[where[name]], node, backward=False)
        for name, node in captured.grads.items():
            base, output = self._base(node)
            self._result_reading(base, output, self.of[where[name]], node, backward=True)

    def _result_reading(self, base: fx.Node, output: int, target: int, node: fx.Node, *, backward: bool) -> None:
        reading = Reading(
            source=self.of[base],
            output=output,
            via=None,
            reader=target,
            at=0,
            node=node,
            of=base,
            backward=backward,
            early=False,
            behind=target,
        )
        (self.grads if backward else self.readings).append(reading)

    # -- costs -------------------------------------------------------------------------------------------------------

    def _local(self, decision: Decision, output: int) -> Local:
        table, states = decision.tables[output], decision.states[output]
        assert table is not None and states is not None
        return Local(table.local[states], table.bytes[states])

    def _seconds(self, decision: Decision) -> np.ndarray:
        """Seconds of one member under each strategy."""
        count = len(decision.strategies)
        node = decision.node
        if decision.kind == "source" and node in self.parameters and self.captured.sources[node].requires_grad:  # type: ignore[index]
            return self.optimizer_s(self._local(decision, 0).bytes) / self.accumulation.microbatches
        if decision.kind != "op" or node is None:
            return np.zeros(count)
        ins = [self._input_local(decision, at, source) for at, source in enumerate(tensor_args(node))]
        outs = [self._local(decision, i) if t is not None else None for i, t in enumerate(decision.tables)]
        return op_seconds(node, outs, ins, self.prices, self.fusion, [s.local for s in decision.strategies])

    def _input_table(self, decision: Decision, at: int, source: fx.Node) -> tuple[TransitionTable, np.ndarray]:
        value = values_of(source)[0]
        assert value is not None
        layouts = [s.ins[at] for s in decision.strategies]
        table = self.transitions.table(value.shape, value.element_size(), extremes=any(map(extremes, layouts)))
        return table, np.array([table.index[layout] for layout in layouts], dtype=np.int64)

    def _input_local(self, decision: Decision, at: int, source: fx.Node) -> Local:
        table, states = self._input_table(decision, at, source)
        return Local(table.local[states], table.bytes[states])

    def _node_costs(self, index: int) -> np.ndarray:
        decision = self.decisions[index]
        return decision.seconds * decision.weight + self.unary.get(index, 0.0)

    def _edge_costs(self) -> None:
        """Every way a tensor goes, uses of the same kind added up: source to hub, then hub (or source) to reader."""
        weights: dict[tuple, float] = defaultdict(float)
        shown: dict[tuple, Reading] = {}
        hubs: set[tuple] = set()
        names = self.captured.names
        share, beside = self.accumulation.share, self.accumulation.hides
        kept = 1.0 / self.accumulation.microbatches
        reads = ((r, kept if keeps(self.decisions[r.reader]) else 1.0) for r in self.readings)
        for reading, part in (*reads, *((r, share) for r in self.grads)):
            start, output = (reading.source, reading.output) if reading.via is None else (reading.via, 0)
            at = reading.at if self.decisions[reading.reader].kind == "op" else None
            hides = reading.early or (self.decisions[reading.reader].node in self.parameters and beside)
            key = (start, output, reading.reader, at, reading.backward, hides)
            weights[key] += part * self.blocks.uses(names[reading.of], names[reading.node])
            shown[key] = reading
            if reading.via is not None and (reading.of, reading.output, reading.backward) not in hubs:
                hubs.add((reading.of, reading.output, reading.backward))
                key = (reading.source, reading.output, reading.via, None, reading.backward, hides)
                weights[key] += self.blocks.share(names[reading.of])
                shown[key] = reading
        for (start, output, reader, at, _, hides), weight in weights.items():
            self._way(start, output, reader, at, shown[start, output, reader, at, _, hides], weight, hides)

    def _from_parameter(self, node: fx.Node) -> bool:
        """Whether a node is a parameter, or what views and casts make of one."""
        while (
            node.op == "call_function"
            and len(node.all_input_nodes) == 1
            and op_name(node) in ("permute", "reshape", "_to_copy", "expand", "alias")
        ):
            node = node.all_input_nodes[0]
        return node in self.parameters

    def _way(
        self, source: int, output: int, reader: int, at: int | None, reading: Reading, weight: float, hides: bool
    ) -> None:
        """Add the seconds of moving a tensor from `source` to `reader` to the edge between them."""
        a, b = self.decisions[source], self.decisions[reader]
        table, rows = a.tables[output], a.states[output]
        assert table is not None and rows is not None
        if at is None:
            other, columns = b.tables[0], b.states[0]
        else:
            other, columns = self._input_table(b, at, tensor_args(reading.node)[at])
        assert other is not None and columns is not None
        if other is not table:
            wide = table if len(table.layouts) >= len(other.layouts) else other
            rows = np.array([wide.index[table.layouts[i]] for i in rows])
            columns = np.array([wide.index[other.layouts[i]] for i in columns])
            table = wide
        many = min(len(rows), len(columns)) > 1 and len(rows) * len(columns) > WRITTEN_OUT
        if source != reader and not hides and many:
            way = Way(table=table, rows=rows, columns=columns, weight=weight)
            _add(self.edges, (min(source, reader), max(source, reader)), way if source < reader else way.T)
            return
        cost = table.seconds[np.ix_(rows, columns)] * weight
        if source == reader:
            self.unary[source] = self.unary.get(source, np.zeros(len(rows))) + np.diagonal(cost)
            return
        pair = (source, reader) if source < reader else (reader, source)
        if hides:
            # Hidden communication takes a share of memory bandwidth and of the multiprocessors.
            gradient, once = reading in self.grads, self.accumulation.once
            ahead = behind_what(a, b, self.decisions[reading.behind], reading, gradient=gradient, once=once)
            exposed = np.maximum(cost * self.prices.unhidden, cost - ahead * weight)
            behind = np.where(np.isfinite(cost), cost - np.where(np.isfinite(cost), exposed, 0.0), 0.0)
            _add(self.hidden, pair, behind if source < reader else behind.T)
            cost = exposed
        cost = cost if source < reader else cost.T
        _add(self.edges, pair, cost)


def _add(matrices: dict[Pair, Any], pair: Pair, cost: Any) -> None:
    matrices[pair] = np.asarray(matrices[pair]) + np.asarray(cost) if pair in matrices else cost


def extremes(layout: Layout) -> bool:
    """Whether a layout holds partial maxima or minima."""
    return any(p in EXTREMES for p in layout)

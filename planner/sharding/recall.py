"""From a plan back to choices: what a plan says of a model, as a solution of that model's problem.

Needed to price a plan anew, to start a search from it, to explain it, and to carry it over to a changed model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from torch import fx

from ...passes.graph import tensor_args
from ...passes.naming import op_name
from ...plans.layouts import Layout
from ...plans.plan import Edge, Node, Plan
from ...plans.stamps import Stamp, paired
from .decisions import Decision, Formulation, Reading
from .folding import Blocks

__all__ = ["Recalled", "recall"]

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Recalled:
    """What of a plan holds for a problem.

    choices   by decision; a decision that is not in it is open
    places    decisions by the plan's name of what they are about
    missing   names of the model that the plan has no entry for
    misfits   names whose entry in the plan is no choice of this model's, with the reason
    unused    names of the plan that the model does not have
    """

    choices: dict[int, int] = field(default_factory=dict)
    places: dict[str, set[int]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    misfits: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether plan and model agree in every name and choice."""
        return not (self.missing or self.misfits or self.unused)


def recall(plan: Plan, formulation: Formulation) -> Recalled:
    """The choices that `plan` makes of the decisions of `formulation`, on the same mesh.

    Lists of blocks may have other lengths: the first block follows the first, the last the last, and those between
    what the plan says of the blocks between. Raises nothing for what does not fit: see `Recalled`.
    """
    return _Recall(plan, formulation).run()


class _Recall:
    def __init__(self, plan: Plan, formulation: Formulation) -> None:
        self.formulation = formulation
        self.entries = _Entries(plan, formulation.blocks)
        self.found = Recalled()
        self.missing: dict[str, None] = {}

    def run(self) -> Recalled:
        formulation = self.formulation
        names = formulation.captured.names
        for node, index in formulation.of.items():
            if node.op != "call_function":
                name = names[node]
                self._held(name, index, self.entries.source(name))
        for key, index in formulation.results.items():
            name = formulation.captured.output_tree.names[int(key.split(".")[1])]
            self._held(name, index, self.entries.output(name))
        for node in formulation.captured.ops():
            if op_name(node) != "getitem":
                self._op(node)
        self._hubs()
        self.found.missing = tuple(self.missing)
        self.found.unused = self.entries.unused()
        return self.found

    def _decision(self, index: int) -> Decision:
        return self.formulation.decisions[index]

    def _held(self, name: str, index: int, wanted: Layout | None) -> None:
        """The choice of a tensor that lies somewhere: a source, a tangent or an output."""
        options = [strategy.outs[0] for strategy in self._decision(index).strategies]
        if wanted is None:
            self.missing.setdefault(self.formulation.blocks.pattern(name))
        elif wanted in options:
            self._choose(name, index, options.index(wanted))
        else:
            self.found.misfits.setdefault(name, f"it cannot lie as {','.join(wanted)} here")

    def _choose(self, name: str, index: int, choice: int) -> None:
        self.found.places.setdefault(self.entries.last, set()).add(index)
        known = self.found.choices.setdefault(index, choice)
        if known != choice:
            self.found.misfits.setdefault(name, "the plan says something else of it than of its equals here")

    def _op(self, node: fx.Node) -> None:
        formulation = self.formulation
        name = formulation.captured.names[node]
        entry = self.entries.node(name)
        if entry is None:
            self.missing.setdefault(formulation.blocks.pattern(name))
            return
        index = formulation.of[node]
        wanted = (entry.outputs, tuple(edge.layout for edge in entry.inputs), entry.rule)
        for choice, strategy in enumerate(self._decision(index).strategies):
            if (tuple(strategy.outs), tuple(strategy.ins), strategy.local) == wanted:
                self._choose(name, index, choice)
                return
        self.found.misfits.setdefault(name, "it cannot run as the plan says here")

    def _hubs(self) -> None:
        """A hub is not in the plan; the steps on both sides of it tell where it lies, and of equals the cheapest."""
        through: dict[int, list[Reading]] = defaultdict(list)
        for reading in self.formulation.readings:
            if reading.via is not None:
                through[reading.via].append(reading)
        near = _neighbours(self.formulation)
        for hub, readings in through.items():
            if all(index in self.found.choices for r in readings for index in (r.source, r.reader)):
                self._hub(hub, readings, near[hub])

    def _hub(self, hub: int, readings: list[Reading], near: list[tuple[int, int]]) -> None:
        problem, choices = self.formulation.problem, self.found.choices
        cost = problem.nodes[hub].copy()
        for pair in near:
            matrix = problem.edges[pair]
            cost += matrix[:, choices[pair[1]]] if pair[0] == hub else matrix[choices[pair[0]]]
        able = [int(choice) for choice in np.flatnonzero(np.isfinite(cost))]
        if able:
            rank = {c: (sum(self._differs(r, c) for r in readings), float(cost[c])) for c in able}
            choices[hub] = min(able, key=lambda choice: rank[choice])

    def _differs(self, reading: Reading, choice: int) -> bool:
        """Whether the way over this choice of the hub is another one than the plan's."""
        formulation, choices = self.formulation, self.found.choices
        edge = self._edge(reading)
        if edge is None:
            return False
        source, reader = self._decision(reading.source), self._decision(reading.reader)
        start = source.strategies[choices[reading.source]].outs[reading.output]
        assert reading.via is not None
        middle = self._decision(reading.via).strategies[choice].outs[0]
        end = reader.strategies[choices[reading.reader]].ins[reading.at]
        value = reading.of.meta["val"]
        value = value[reading.output] if isinstance(value, (tuple, list)) else value
        assert start is not None and middle is not None and end is not None
        for extremes in (False, True):
            table = formulation.transitions.table(value.shape, value.element_size(), extremes=extremes)
            if all(layout in table.index for layout in (start, middle, end)):
                return edge.steps != table.way(start, middle) + table.way(middle, end)
        return True

    def _edge(self, reading: Reading) -> Edge | None:
        formulation = self.formulation
        if reading.node.op != "call_function" or self._decision(reading.reader).kind != "op":
            return None
        entry = self.entries.node(formulation.captured.names[reading.node])
        return entry.inputs[reading.at] if entry and reading.at < len(tensor_args(reading.node)) else None


def _neighbours(formulation: Formulation) -> dict[int, list[tuple[int, int]]]:
    near: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in formulation.problem.edges:
        near[pair[0]].append(pair)
        near[pair[1]].append(pair)
    return near


class _Entries:
    """The entries of a plan by the names of another model: `blocks` are those of the model."""

    def __init__(self, plan: Plan, blocks: Blocks) -> None:
        self.nodes = {node.name: node for node in plan.nodes}
        self.sources = {t.name: t.layout for t in (*plan.parameters, *plan.buffers, *plan.inputs)}
        self.outputs = {tensor.name: tensor.layout for tensor in plan.outputs}
        self.blocks, self.ndim = blocks, plan.mesh.ndim
        ours = [stamp for run in blocks.runs for stamp in run.stamps]
        self.pairs = paired(ours, plan.model.stamps())
        self.used: set[tuple[int, str]] = set()
        self.last = ""

    def node(self, name: str) -> Node | None:
        """The entry of an op."""
        return self._first(self.nodes, name)

    def output(self, name: str) -> Layout | None:
        """Where an output lies."""
        return self._first(self.outputs, name)

    def source(self, name: str) -> Layout | None:
        """Where a parameter, buffer or input lies; tangents and constants lie whole on every device."""
        self.last = name
        found = self._first(self.sources, name)
        return ("R",) * self.ndim if found is None and name.startswith(("tangent.", "constant.")) else found

    def _first(self, table: Mapping[str, _T], name: str) -> _T | None:
        for key in self._keys(name):
            if key in table:
                self.used.add((id(table), key))
                self.last = key
                return table[key]
        return None

    def _keys(self, name: str) -> list[str]:
        """Names in the plan for `name` in the model, its own first, then that of its kind of block."""
        here = self.blocks.stamp(name)
        if here is None:
            return [self._moved(name)]
        number, there = here.number(name), self.pairs.get(here)
        if there is None or number is None:
            return [name]
        at, last = here.numbers.index(number), len(there.numbers) - 1
        own = there.numbers[last] if number == here.numbers[-1] else there.numbers[at] if at < last else None
        # Of two blocks, the last is the only one that has a block before it, as those between have.
        parts = (own, there.mark, there.numbers[last] if at else None)
        return list(dict.fromkeys(there.put(name, part) for part in parts if part is not None))

    def _moved(self, name: str) -> str:
        """A block of a list that is of no kind keeps its distance to the kinds before it."""
        for path in {stamp.path for stamp in self.pairs}:
            whole = Stamp.of(path, range(2**20), whole=True)
            number = whole.number(name)
            if number is not None:
                before = [(a, b) for a, b in self.pairs.items() if a.path == path and a.numbers[-1] < number]
                return whole.put(name, number + sum(len(b.numbers) - len(a.numbers) for a, b in before))
        return name

    def unused(self) -> tuple[str, ...]:
        """Names of the plan that were never asked for; results of the step follow from the others."""
        results = ("output", "update", "gradient")
        ops = {name: node for name, node in self.nodes.items() if node.op not in results}
        tables = ((self.sources, self.sources), (self.outputs, self.outputs), (self.nodes, ops))
        return tuple(n for table, names in tables for n in names if (id(table), n) not in self.used)

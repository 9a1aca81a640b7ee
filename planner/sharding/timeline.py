"""Memory over the step: what is alive on a device at each moment of the program, as a function of the choices.

The program runs forward, then backward, then the optimizer, in graph order; a value is freed after its last use and a
view lives on its base. Parameters and optimizer state are alive throughout, gradients from their making to the end,
saved activations to their last backward use, and the copies that redistributions make to the last reader sharing them.

Everything alive is an *item*: bytes that depend on one decision or on a pair, and how many of it are alive at each
moment. Where the middle blocks of a model were left out of the capture, one of the captured blocks stands for them:
counts are taken at moments in the first and the last block, between which memory is linear in the block's number."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from torch import fx

from ...passes.blocks import Run
from ...passes.graph import tensor_args
from ...passes.keeping import is_keep
from ...passes.naming import op_name
from ...plans.plan import Memory
from ..solver.problem import Pair, Problem, Row
from ..solver.ways import Moved
from .decisions import Formulation, Reading
from .folding import CAPTURED
from .op_costs import is_view
from .optimizers import Optimizer
from .transitions import TransitionTable

__all__ = ["Timeline"]

_HELD = ("parameters", "gradients", "optimizer")
Item = tuple[str, "int | Pair", tuple]


class Timeline:
    """Items of a formulation, with the state of `optimizer` and what its step makes on `device`."""

    def __init__(self, formulation: Formulation, *, optimizer: Optimizer, device: str) -> None:
        self.formulation = formulation
        captured = formulation.captured
        ops = [n for n in captured.ops() if op_name(n) != "getitem"]
        self.order = [n for n in ops if n not in captured.backward] + [n for n in ops if n in captured.backward]
        self.moment = {node: i for i, node in enumerate(self.order)}
        self._backward = {i for i, node in enumerate(self.order) if node in captured.backward}
        self.end = len(self.order)
        self._middles = {run: self._middle(run) for run in formulation.blocks.cut}
        self.bytes: dict[Item, np.ndarray | Moved] = {}
        self._spans: dict[Item, list[tuple[int, int, int]]] = defaultdict(list)
        self._last: dict[fx.Node, int] = {}
        self._held: set[Item] = set()
        self._collect(optimizer, device)
        self.items = list(self._spans)
        self.counts = (
            np.stack([self._counted(item) for item in self.items]) if self.items else np.zeros((0, self.end + 1))
        )
        self.valid = self._valid()

    def staged(self, ranks: int, in_flight: int) -> Timeline:
        """The same for a pipeline rank that holds one in `ranks` of the model and what `in_flight` micro-batches save:
        parameters, gradients and optimizer divided by the ranks, activations too but one set per micro-batch, and what
        comes and goes within an op as it is."""
        staged = copy.copy(self)
        if not self.items:
            return staged
        held = np.array([item[0] in _HELD or item in self._held for item in self.items])[:, None]
        forward = self.end - len(self._backward)
        saved = np.where(held, 0.0, self.counts[:, max(0, forward - 1)][:, None])
        whole = self.counts.max(axis=1, keepdims=True)
        passing = np.where(saved > 0, 0.0, self.counts)
        staged.counts = np.where(held, whole / ranks, saved * (in_flight / ranks) + passing)
        return staged

    def row(self, moment: int, limit: float) -> Row:
        """The hard row that keeps what is alive at `moment` within `limit` bytes."""
        nodes: dict[int, np.ndarray] = {}
        edges: dict[Pair, np.ndarray] = {}
        for item, count in zip(self.items, self.counts[:, moment], strict=True):
            if count:
                into: dict = nodes if isinstance(item[1], int) else edges
                into[item[1]] = into.get(item[1], 0.0) + count * np.asarray(self.bytes[item])
        return Row(name=f"memory at {self.at(moment)}", limit=limit, nodes=nodes, edges=edges)

    def at(self, moment: int) -> str:
        """The moment in words."""
        return self.formulation.captured.names[self.order[moment]] if moment < self.end else "the optimizer's step"

    def profile(self, choices: Sequence[int]) -> np.ndarray:
        """Bytes alive at every moment, the optimizer's last; moments that do not count are 0."""
        return np.where(self.valid, self._sizes(choices) @ self.counts, 0.0)

    def least(self, problem: Problem) -> np.ndarray:
        """Bytes that every plan of `problem` has alive at each moment: the least of each item by itself."""
        sizes = np.zeros(len(self.items))
        for at, item in enumerate(self.items):
            index, values = item[1], self.bytes[item]
            if isinstance(index, int) and isinstance(values, np.ndarray):
                sizes[at] = np.min(values, where=np.isfinite(problem.nodes[index]), initial=np.inf)
        return np.where(self.valid, np.where(np.isfinite(sizes), sizes, 0.0) @ self.counts, 0.0)

    def memory(self, choices: Sequence[int], limit: int | None) -> Memory:
        """The memory figure of a plan: its peak, and what the peak consists of."""
        profile = self.profile(choices)
        peak = int(np.argmax(profile))
        parts: dict[str, float] = defaultdict(float)
        for item, size, count in zip(self.items, self._sizes(choices), self.counts[:, peak], strict=True):
            parts[item[0]] += size * count
        return Memory(
            parameters_bytes=round(parts["parameters"]),
            gradients_bytes=round(parts["gradients"]),
            optimizer_bytes=round(parts["optimizer"]),
            activations_bytes=round(parts["activations"]),
            gathered_bytes=round(parts["gathered"]),
            communication_bytes=round(parts["communication"]),
            other_bytes=round(parts["other"]),
            peak_bytes=round(float(profile[peak])),
            limit_bytes=limit,
        )

    def _sizes(self, choices: Sequence[int]) -> np.ndarray:
        found = []
        for item in self.items:
            index, values = item[1], self.bytes[item]
            at = (choices[index],) if isinstance(index, int) else (choices[index[0]], choices[index[1]])
            found.append(values[at])
        return np.array(found)

    def _collect(self, optimizer: Optimizer, device: str) -> None:
        captured, decisions = self.formulation.captured, self.formulation.decisions
        for node, source in captured.sources.items():
            if node not in self.formulation.of:
                continue
            index = self.formulation.of[node]
            table, states = decisions[index].tables[0], decisions[index].states[0]
            assert table is not None and states is not None
            kind = "parameters" if source.kind == "parameter" else "other"
            self._add((kind, index, ()), table.bytes[states], node, 0, self.end, held=True)
            if source.kind == "parameter" and source.requires_grad:
                self._add(
                    ("optimizer", index, ()), optimizer.states * table.bytes[states], node, 0, self.end, held=True
                )
                if (scratch := optimizer.scratch(device)) > 0:
                    self._add(("other", index, ("step",)), scratch * table.bytes[states], node, self.end, self.end)
        for node in self.order:
            self._values(node)
        self._copies()
        for reading in self.formulation.grads:
            born = self.moment[reading.of] if reading.of in self.moment else 0
            if self.formulation.accumulation.unreduced:
                made = decisions[reading.source]
                table, states = made.tables[reading.output], made.states[reading.output]
                item: Item = ("gradients", reading.source, (reading.reader,))
            else:
                table, states = decisions[reading.reader].tables[0], decisions[reading.reader].states[0]
                item = ("gradients", reading.reader, ())
            assert table is not None and states is not None
            self._add(item, table.bytes[states], reading.node, born, self.end)

    def _values(self, node: fx.Node) -> None:
        if is_view(node) or self._stays_in_registers(node):
            return
        index = self.formulation.of[node]
        decision = self.formulation.decisions[index]
        for output, (table, states) in enumerate(zip(decision.tables, decision.states, strict=True)):
            if table is not None and states is not None:
                self._add(
                    ("activations", index, ("value", output)),
                    table.bytes[states],
                    node,
                    self.moment[node],
                    self.last_use(node),
                )

    def _copies(self) -> None:
        hubs: dict[tuple[int, int, int, fx.Node], list[Reading]] = defaultdict(list)
        started = self._started()
        for reading in self.formulation.readings:
            if reading.node not in self.moment:
                continue
            moment = self.moment[reading.node]
            until = self.last_use(reading.node) if is_view(reading.node) else moment
            start, output = (reading.source, reading.output) if reading.via is None else (reading.via, 0)
            born = started.get(moment, moment) if reading.early else moment
            if self._once(reading):
                born, until = 0, self.end
            self._copy(start, output, reading.reader, reading, reading.node, born, until)
            if reading.via is not None:
                hubs[reading.source, reading.output, reading.via, reading.of].append(reading)
        for (source, output, via, of), readings in hubs.items():
            moments = [self.moment[r.node] for r in readings]
            until = max(self.last_use(r.node) if is_view(r.node) else self.moment[r.node] for r in readings)
            first = min(moments)
            self._copy(source, output, via, None, of, started.get(first, first) if readings[0].early else first, until)

    def _once(self, reading: Reading) -> bool:
        """Whether a kept parameter is read, in a step of several micro-batches: its copy serves all of them."""
        return self.formulation.accumulation.once and is_keep(reading.node)

    def _started(self) -> dict[int, int]:
        """For each moment that reads a parameter, the one at which its gather is started: the reading before it."""
        found: dict[int, int] = {}
        early = [r for r in self.formulation.readings if r.early and r.node in self.moment and not is_keep(r.node)]
        for backward in (False, True):
            moments = sorted({self.moment[r.node] for r in early if r.backward == backward})
            found |= dict(zip(moments[1:], moments, strict=False))
        for node in filter(is_keep, self.order):
            first = min(self.moment[user] for user in node.users)
            found[self.moment[node]] = found.get(first, first)
        return found

    def _copy(
        self, source: int, output: int, reader: int, reading: Reading | None, node: fx.Node, born: int, dies: int
    ) -> None:
        """A copy that exists when the layouts at the two ends of a way differ."""
        if source == reader:
            return
        decisions = self.formulation.decisions
        table, rows = decisions[source].tables[output], decisions[source].states[output]
        assert table is not None and rows is not None
        part = "gathered" if self._early(reading, source) else "communication"
        item: Item = (
            part,
            (min(source, reader), max(source, reader)),
            (output, reading.at if reading else None, source),
        )
        if item not in self.bytes:
            sizes, columns = self._target(reader, reading, table)
            self.bytes[item] = Moved(rows=rows, columns=columns, bytes=sizes, flipped=source > reader)
        once = reading is not None and self._once(reading)
        self._add(item, self.bytes[item], node, born, dies, held=once)
        if once:
            self._held.add(item)
        if not self._early(reading, source):
            # Moving along an inner dim packs the pieces: for a moment there are two of the copy.
            packed: Item = ("communication", item[1], ("packed", *item[2]))  # type: ignore[misc]
            self._add(packed, self.bytes[item], node, born, born)

    def _early(self, reading: Reading | None, source: int) -> bool:
        """Whether a copy is of a parameter, which is split along its first dim as a rule."""
        decision = self.formulation.decisions[source]
        return reading.early if reading is not None else decision.kind == "source"

    def _target(self, reader: int, reading: Reading | None, table: TransitionTable) -> tuple[np.ndarray, np.ndarray]:
        decision = self.formulation.decisions[reader]
        if reading is None or decision.kind != "op":
            other, states = decision.tables[0], decision.states[0]
            assert other is not None and states is not None
            layouts = [other.layouts[s] for s in states]
            sizes = other.bytes[states]
        else:
            layouts = [s.ins[reading.at] for s in decision.strategies]
            value = tensor_args(reading.node)[reading.at].meta["val"]
            other = self.formulation.transitions.table(
                value.shape,
                value.element_size(),
                extremes=any(p in ("P(max)", "P(min)") for s in layouts for p in s),
            )
            sizes = other.bytes[[other.index[s] for s in layouts]]
        return sizes, np.array([table.index.get(s, -1) for s in layouts])

    def _add(
        self, item: Item, values: np.ndarray | Moved, node: fx.Node, born: int, dies: int, *, held: bool = False
    ) -> None:
        """Count an item from `born` to `dies`, for every block that `node` stands for; `held` ones are there always."""
        self.bytes[item] = values
        name = self.formulation.captured.names[node]
        times = self.formulation.blocks.share(name)
        if times == 1 or held:
            self._spans[item].append((born, dies, times))
        else:
            place = self.formulation.blocks.captured(name)
            assert place is not None
            self._spans[item] += self._repeated(place[0], born, dies, times)

    def _repeated(self, run: Run, born: int, dies: int, times: int) -> list[tuple[int, int, int]]:
        """Spans of a value that each of `times` blocks makes, as seen from the other captured blocks: what one block
        hands to the next, or starts for it, is there once; what it saves is there for each, one less after the next
        block has read it in the backward."""
        (first, last), (back, over) = self._middles[run]
        place, later = self._place(dies), dies in self._backward
        spans: list[tuple[int, int, int]] = []
        if born < first:
            spans.append((born, min(dies, first - 1), 1))
        if born <= last < dies:
            count = 1 if place == (run, CAPTURED - 1) and not later else times
            spans.append((last + 1, min(dies, back - 1), count))
            if place == (run, CAPTURED - 1) and later and dies < back:
                spans.append((dies + 1, back - 1, times - 1))
        elif last < born < back:
            spans.append((born, min(dies, back - 1), 1))
        if dies > over:
            handed = place == (run, 0) and born > last
            spans.append((max(born, over + 1), dies, 1 if handed else times))
        return [span for span in spans if span[0] <= span[1]]

    def _middle(self, run: Run) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last moment of the block that stands for the left-out ones, in the forward and in the backward."""
        inside = [i for i in range(self.end) if self._place(i) == (run, 1)]
        ahead = [i for i in inside if i not in self._backward]
        behind = [i for i in inside if i in self._backward] or [self.end]
        return (min(ahead), max(ahead)), (min(behind), max(behind))

    def _place(self, moment: int) -> tuple[Run, int] | None:
        """List and number of the block that runs at `moment`."""
        names = self.formulation.captured.names
        return self.formulation.blocks.captured(names[self.order[moment]]) if moment < self.end else None

    def _stays_in_registers(self, node: fx.Node) -> bool:
        """Whether a compiled program never writes the value of `node`: it lives within a fused kernel."""
        return node in self.moment and not self.formulation.fusion.writes(node)

    def last_use(self, node: fx.Node) -> int:
        """The last moment at which `node`, or a view of it, is read."""
        if node not in self._last:
            captured = self.formulation.captured
            last = self.moment.get(node, 0)
            for user in node.users:
                if user.op == "output":
                    kept = any(node is n for n in captured.outputs)
                    last = max(last, self.end if kept else last)
                    continue
                last = max(last, self.moment.get(user, 0))
                if is_view(user) or op_name(user) == "getitem" or self._stays_in_registers(user):
                    last = max(last, self.last_use(user))
            self._last[node] = last
        return self._last[node]

    def _counted(self, item: Item) -> np.ndarray:
        deltas = np.zeros(self.end + 2)
        for born, dies, times in self._spans[item]:
            deltas[born] += times
            deltas[dies + 1] -= times
        return np.cumsum(deltas)[: self.end + 1]

    def _valid(self) -> np.ndarray:
        """Moments that count: not those in a captured block that stands for the left-out ones."""
        blocks, names = self.formulation.blocks, self.formulation.captured.names
        return np.array([not blocks.stands_in(names[node]) for node in self.order] + [True])

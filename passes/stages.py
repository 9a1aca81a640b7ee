"""Stages: a captured model cut along its forward, each stage a captured model of its own.

A stage's boundary tensors are ordinary inputs, outputs, tangents and gradients of it, named by the values they are, so
that local programs, simulated ranks and the memory count take a stage as they take a model. Values that cross several
stages are carried through those between. What inputs and buffers alone make (rotary tables, masks) is made again in
each stage that reads it. A parameter that several stages read has in each its own part of the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from .graph import Captured, Source
from .keeping import readers_of
from .naming import op_name
from .places import Places, stage_starts

__all__ = ["StageProgram", "Value", "cut_stages"]

# A value by the op that makes it and the number of its output.
Value = tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """One stage of a captured micro-batch.

    captured   sources: what it reads, then what it receives; outputs: what it sends on, the model outputs it makes,
               None for every gradient it receives; tangents: by index of outputs; grads: of parameters and inputs,
               then what it sends back
    receives, sends                      forward values by name, in the order both sides keep
    receives_gradient, sends_gradient    gradient values by name, likewise
    results    index of a model output to its index in `outputs`
    shared     parameters that other stages hold too
    values     every boundary value by name: the op that makes it and the number of the output
    sums       parameters whose gradient is summed over stages: the sums that their part goes through in the whole model
    """

    index: int
    captured: Captured
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    receives_gradient: tuple[str, ...]
    sends_gradient: tuple[str, ...]
    results: Mapping[int, int]
    shared: frozenset[str]
    values: Mapping[str, Value]
    sums: Mapping[str, tuple[tuple[str, int], ...]]


def cut_stages(captured: Captured, firsts: Sequence[str]) -> list[StageProgram]:
    """The stages that begin with `firsts` (see `plans.Stage.first`), in the order of the forward.

    RequestError when a name is of no op, or of one that comes before an earlier stage's.
    """
    places = Places(captured, stage_starts(captured, firsts), len(firsts))
    return [_Builder(captured, places, index).build() for index in range(len(firsts))]


class _Builder:
    """The program of one stage."""

    def __init__(self, captured: Captured, places: Places, index: int) -> None:
        self.captured, self.places, self.index = captured, places, index
        self.graph = fx.Graph()
        self.known: dict[fx.Node, fx.Node] = {}
        self.names: dict[fx.Node, str] = {}
        self.values: dict[str, Value] = {}

    def build(self) -> StageProgram:
        """Copy what this stage runs, with its boundary as placeholders and results."""
        captured, places, index = self.captured, self.places, self.index
        receives = self._crossing(places.forward_reach, index)
        sends = self._crossing(places.forward_reach, index + 1)
        down, up = self._falling(index + 1), self._falling(index)
        grads = {n: parts[index] for n, parts in places.parts.items() if index in parts}
        mutations = {n: v for n, v in captured.mutations.items() if places.of.get(v, 0) == index}
        results = [i for i, n in enumerate(captured.outputs) if n is not None and self._gives(i, n)]
        body = self._body([*grads.values(), *mutations.values()])
        read = {a for n in body for a in n.all_input_nodes} | set(grads.values()) | set(mutations.values())
        read |= {n for i in results if (n := captured.outputs[i]) is not None}
        sources = self._sources(read, receives)
        tangents = self._tangents(read, results, len(sends), down)
        backward: set[fx.Node] = set()
        for node in captured.graph.nodes:
            if node in body or (node.op == "get_attr" and node in read):
                self._copy(node)
                if node in captured.backward:
                    backward.add(self.known[node])
        made = [captured.outputs[i] for i in results]
        outputs = [*(self.known[n] for n in sends), *(self.known[n] for n in made if n is not None)]
        ends = {name: self.known[node] for name, node in grads.items()}
        ends |= {captured.names[node]: self.known[node] for node in up}
        changed = {name: self.known[node] for name, node in mutations.items()}
        self.graph.output(tuple([*outputs, *ends.values(), *changed.values()]))
        stage = dataclasses.replace(
            captured,
            module=fx.GraphModule(captured.module, self.graph),
            sources=sources,
            tangents=tangents,
            outputs=[*outputs, *([None] * len(down))],
            grads=ends,
            mutations=changed,
            order=tuple(s.name for s in sources.values()),
            names=self.names,
            backward=backward,
        )
        self._follow(stage)
        return StageProgram(
            index=index,
            captured=stage,
            receives=tuple(captured.names[n] for n in receives),
            sends=tuple(captured.names[n] for n in sends),
            receives_gradient=tuple(captured.names[n] for n in down),
            sends_gradient=tuple(captured.names[n] for n in up),
            results={i: len(sends) + at for at, i in enumerate(results)},
            shared=frozenset(self._shared(sources)),
            values=self.values,
            sums={n: places.sums_of(n, grads[n]) for n in grads if len(places.parts[n]) > 1},
        )

    def _follow(self, stage: Captured) -> None:
        """GraphModule copies its graph: the nodes of the copy take the place of those it was made from."""
        now = dict(zip(self.graph.nodes, stage.module.graph.nodes, strict=True))
        stage.sources = {now[n]: s for n, s in stage.sources.items()}
        stage.tangents = {i: now[n] for i, n in stage.tangents.items()}
        stage.outputs = [None if n is None else now[n] for n in stage.outputs]
        stage.grads = {name: now[n] for name, n in stage.grads.items()}
        stage.mutations = {name: now[n] for name, n in stage.mutations.items()}
        stage.names = {now[n]: name for n, name in stage.names.items()}
        stage.backward = {now[n] for n in stage.backward}

    def _gives(self, output: int, node: fx.Node) -> bool:
        """Whether the model's output number `output` is made here; what is a source is given by the last stage."""
        last = self.places.stages - 1
        return (self.places.of[node] if node in self.places.of else last) == self.index

    def _crossing(self, reach: Mapping[fx.Node, int], cut: int) -> list[fx.Node]:
        """Forward values that cross in front of stage `cut`."""
        of, order = self.places.of, self.captured.ops()
        return [n for n in order if n in reach and of[n] < cut <= reach[n]]

    def _falling(self, cut: int) -> list[fx.Node]:
        """Gradient values that cross down in front of stage `cut`."""
        of, reach = self.places.of, self.places.backward_reach
        order = [*self.captured.tangents.values(), *self.captured.ops()]
        return [n for n in order if n in reach and reach[n] < cut <= of[n]]

    def _body(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """The ops that run here: this stage's own, and the light ones that these read."""
        places = self.places
        idle = places.light | places.dropped
        own = {n for n in self.captured.ops() if places.of[n] == self.index and n not in idle}
        stack = [a for n in own for a in n.all_input_nodes] + list(ends)
        stack += [n for i, n in enumerate(self.captured.outputs) if n is not None and self._gives(i, n)]
        while stack:
            node = stack.pop()
            if node in places.light and node.op == "call_function" and node not in own:
                own.add(node)
                stack += node.all_input_nodes
        return own

    def _sources(self, read: set[fx.Node], receives: list[fx.Node]) -> dict[fx.Node, Source]:
        found: dict[fx.Node, Source] = {}
        held = self._held()
        for node, source in self.captured.sources.items():
            if node in read or source.name in held:
                found[self._placeholder(node)] = source
        for node in receives:
            value = self._boundary(node)
            self.known[node] = self._placeholder(node)
            found[self.known[node]] = Source(
                kind="input",
                name=self.captured.names[node],
                shape=tuple(value.shape),
                dtype=value.dtype,
                requires_grad=False,
            )
        return found

    def _held(self) -> set[str]:
        """Sources that nothing here needs to read but that are this stage's to keep: what gets a gradient here, changed
        buffers, unused ones by the last."""
        changed = {n for n, v in self.captured.mutations.items() if self.places.of.get(v, 0) == self.index}
        changed |= {n for n, parts in self.places.parts.items() if self.index in parts}
        if self.index != self.places.stages - 1:
            return changed
        unused = {s.name for n, s in self.captured.sources.items() if s.kind != "input" and not n.users}
        return changed | (unused - set(self.captured.mutations))

    def _tangents(
        self, read: set[fx.Node], results: Sequence[int], sent: int, down: Sequence[fx.Node]
    ) -> dict[int, fx.Node]:
        found: dict[int, fx.Node] = {}
        at = {index: sent + position for position, index in enumerate(results)}
        for index, node in self.captured.tangents.items():
            if self.places.of[node] == self.index and index in at:
                placed = self.known[node] = self._placeholder(node)
                self.names[placed] = f"tangent.{at[index]}"
                found[at[index]] = placed
        for position, node in enumerate(down):
            self._boundary(node)
            self.known[node] = self._placeholder(node)
            found[sent + len(results) + position] = self.known[node]
        return found

    def _boundary(self, node: fx.Node) -> torch.Tensor:
        """The fake value of a boundary value, whose maker is remembered."""
        name = self.captured.names[node]
        if op_name(node) == "getitem":
            source, number = node.args[0], node.args[1]
            self.values[name] = (self.captured.names[source], number)  # type: ignore[index,assignment]
        else:
            self.values[name] = (name, 0)
        return node.meta["val"]

    def _placeholder(self, node: fx.Node) -> fx.Node:
        placed = self.graph.placeholder(node.name)
        placed.meta = dict(node.meta)
        self.known[node], self.names[placed] = placed, self.captured.names[node]
        return placed

    def _copy(self, node: fx.Node) -> None:
        self.known[node] = self.graph.node_copy(node, lambda n: self.known[n])
        self.names[self.known[node]] = self.captured.names[node]

    def _shared(self, sources: Mapping[fx.Node, Source]) -> Iterable[str]:
        """Parameters that ops of other stages read as well."""
        for node, source in self.captured.sources.items():
            if source.kind == "parameter" and source.name in {s.name for s in sources.values()}:
                stages = {self.places.of[u] for u in readers_of(node) if u in self.places.of}
                stages |= set(self.places.parts.get(source.name, ()))
                if stages - {self.index}:
                    yield source.name

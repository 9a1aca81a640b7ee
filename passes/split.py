"""A local program in two halves: forward with what it saves, backward from what was saved."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from .local import LocalProgram
from .naming import draws_random
from .prefetch import prefetch

__all__ = ["Cut", "Halves", "copied", "cut", "module_of", "split"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The graphs of `Halves`, before they are modules."""

    forward: fx.Graph
    backward: fx.Graph
    kept: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """forward(*sources) gives (outputs..., mutations..., saved...); backward(*saved, *tangents) gives gradients.

    `kept` gives, per saved value, the index of the source that it is, or None where it is computed.
    """

    program: LocalProgram
    forward: fx.GraphModule
    backward: fx.GraphModule
    kept: tuple[int | None, ...]

    @property
    def results(self) -> int:
        """How many of the forward's results come before the saved ones."""
        return len(self.program.outputs) + len(self.program.mutations)


def split(program: LocalProgram, *, early: bool = False) -> Halves:
    """Cut `program` where its backward begins; `early` starts gathers ahead of their use (passes/prefetch.py)."""
    parts = cut(program, early=early)
    return Halves(
        program=program,
        forward=module_of(program, parts.forward),
        backward=module_of(program, parts.backward),
        kept=parts.kept,
    )


def cut(program: LocalProgram, *, early: bool = False) -> Cut:
    """The graphs of the two halves, in the order in which they run."""
    nodes = list(program.graph.nodes)
    ends: Any = nodes[-1].args[0]
    placeholders = [n for n in nodes if n.op == "placeholder"]
    sources, tangents = placeholders[: len(program.sources)], placeholders[len(program.sources) :]
    count = len(program.outputs) + len(program.mutations)
    results, gradients = ends[:count], ends[count:]
    first = {n for n in nodes if n.op != "output" and n not in program.backward and n not in tangents}
    # What is saved is a tensor: one of several results of an op is taken from them before.
    first |= {n for n in nodes if n.target is operator.getitem and n.args[0] in first}
    later = [n for n in nodes if n not in first and n in program.backward]
    read = [i for n in later for i in n.all_input_nodes]
    saved = [n for n in dict.fromkeys((*read, *gradients)) if n in first and n.op != "get_attr"]
    position = {n: i for i, n in enumerate(sources)}
    forward = copied([n for n in nodes if n in first], sources, (*results, *saved))
    constants = [n for n in nodes if n.op == "get_attr"]
    backward = copied([*constants, *later], [*saved, *tangents], tuple(gradients))
    if early:
        prefetch(forward)
        prefetch(backward)
    return Cut(forward=forward, backward=backward, kept=tuple(position.get(n) for n in saved))


def copied(body: list[fx.Node], inputs: list[fx.Node], outputs: tuple[fx.Node, ...]) -> fx.Graph:
    """A graph from `inputs` to `outputs` of the nodes in `body`, in their order."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        known[node] = graph.placeholder(node.name)
    for node in body:
        if node not in known:
            known[node] = graph.node_copy(node, lambda n: known[n])
    graph.output(tuple(known[n] for n in outputs))
    graph.eliminate_dead_code(_must_stay)
    return graph


def _must_stay(node: fx.Node) -> bool:
    """Collectives and random draws stay even where nothing reads them: other ranks and later draws rely on them."""
    if node.op in ("placeholder", "output"):
        return True
    name = getattr(node.target, "namespace", "")
    return name == "_c10d_functional" or draws_random(node)


def module_of(program: LocalProgram, graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module that holds the constants of `program`."""
    root = torch.nn.Module()
    for name, value in program.constants.items():
        if isinstance(value, torch.Tensor):
            root.register_buffer(name, value, persistent=False)
        else:
            setattr(root, name, value)
    return fx.GraphModule(root, graph)

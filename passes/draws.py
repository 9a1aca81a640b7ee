"""Random numbers that a checkpointed region draws again are the ones that it drew first.

A region that the backward computes again (torch.utils.checkpoint) restores the state of the random generator before it
does. A traced graph has no such state: there the second draw must read the result of the first. Which one that is, is
told by values: a recomputed node is the same op on the same values as a node of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..plans.errors import CaptureError
from .graph import argument, replace
from .naming import draws_random, op_name

__all__ = ["reuse_draws"]

aten = torch.ops.aten
_IDENTITIES = {aten.alias.default, aten.detach.default}


def reuse_draws(graph: fx.Graph) -> None:
    """Let recomputed draws read those of the forward, and label recomputed nodes with the module that they repeat.

    Raises CaptureError where draws are alike and it cannot be told which of them is repeated.
    """
    first: dict[fx.Node, fx.Node] = {}
    while True:
        values = _Values(graph, first)
        if not values.unclear:
            break
        for (key, path), repeated in values.unclear.items():
            first |= _in_order(repeated, values.alike(key, path), values)
    for node, twin in values.twins.items():
        if not node.meta.get("nn_module_stack") and node in values.given:
            node.meta["nn_module_stack"] = dict(twin.meta.get("nn_module_stack", {}))
    for node, drawn in first.items():
        replace(node, drawn)


class _Values:
    """Value numbers: two nodes with one number hold the same value. `first` maps repeated draws to their first."""

    def __init__(self, graph: fx.Graph, first: dict[fx.Node, fx.Node]) -> None:
        self.numbers: dict[fx.Node, int] = {}
        self.known: dict[Any, int] = {}
        self.forward: dict[int, fx.Node] = {}
        self.draws: dict[Any, list[fx.Node]] = {}
        self.twins: dict[fx.Node, fx.Node] = {}
        self.unclear: dict[tuple[Any, str | None], list[fx.Node]] = {}
        self.given: set[fx.Node] = set()  # depends on a parameter, buffer or input
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.gradients: list[int] = []  # places of the nodes that depend on a tangent
        learnt: set[fx.Node] = set()
        for node in graph.nodes:
            tangent = node.op == "placeholder" and node.name.startswith("tangents")
            if tangent or any(n in learnt for n in node.all_input_nodes):
                learnt.add(node)
                self.gradients.append(self.order[node])
            if node.op == "placeholder" or any(n in self.given for n in node.all_input_nodes):
                self.given.add(node)
            self.numbers[node] = self._number(node, first)

    def _number(self, node: fx.Node, first: dict[fx.Node, fx.Node]) -> int:
        if node in first:
            return self.numbers[first[node]]
        if node.op != "call_function":
            return self._new()
        if node.target in _IDENTITIES:
            return self.numbers[argument(node, 0)]
        key = (node.target, self._part(node.args), self._part(node.kwargs))
        again = node.meta.get("partitioner_tag") == "is_backward"
        if draws_random(node):
            return self._drawn(node, key, first) if again else self._draw(node, key)
        number = self.known.setdefault(key, len(self.known))
        if not again:
            self.forward.setdefault(number, node)
        elif number in self.forward:
            self.twins[node] = self.forward[number]
        return number

    def _new(self) -> int:
        return self.known.setdefault(object(), len(self.known))

    def _draw(self, node: fx.Node, key: Any) -> int:
        self.draws.setdefault(key, []).append(node)
        return self._new()

    def _drawn(self, node: fx.Node, key: Any, first: dict[fx.Node, fx.Node]) -> int:
        alike = self.alike(key, _path(node))
        if len(alike) == 1:
            first[node] = alike[0]
            return self.numbers[alike[0]]
        if alike:
            self.unclear.setdefault((key, _path(node)), []).append(node)
        return self._new()

    def alike(self, key: Any, path: str | None) -> list[fx.Node]:
        """Draws of the forward with `key`, in the module `path` if that is known."""
        return [n for n in self.draws.get(key, ()) if path is None or path == _path(n)]

    def _part(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("#", self.numbers[value])
        if isinstance(value, (list, tuple)):
            return tuple(map(self._part, value))
        if isinstance(value, dict):
            return tuple((key, self._part(item)) for key, item in value.items())
        return (type(value).__name__, repr(value))


def _in_order(repeated: list[fx.Node], alike: list[fx.Node], values: _Values) -> dict[fx.Node, fx.Node]:
    """The first draws, among those `alike`, of several `repeated` ones.

    A region is repeated in one go, the last region first: between two of them stand nodes that depend on a tangent.
    """
    if len(repeated) != len(alike):
        raise CaptureError(
            "'model' must tell its random draws apart where a checkpointed region repeats them, got "
            f"{len(repeated)} repetitions of {len(alike)} equal draws of {op_name(alike[0])} in "
            f"{_path(alike[0]) or 'the root module'}; draw them in modules of their own (nn.Dropout), or do not "
            "checkpoint this region"
        )
    runs: list[list[fx.Node]] = []
    for node in repeated:
        place = values.order[node]
        if not runs or any(values.order[runs[-1][-1]] < at < place for at in values.gradients):
            runs.append([])
        runs[-1].append(node)
    return dict(zip([node for run in reversed(runs) for node in run], alike, strict=True))


def _path(node: fx.Node) -> str | None:
    """The module in which a node was traced; None outside of any."""
    stack = node.meta.get("nn_module_stack")
    return list(stack)[-1] if stack else None

"""What a step computes twice: nodes of the backward that compute a value of the forward again.

Which ones they are is told by values, so that it does not matter who repeats them: this planner's recomputation or a
region that the model's author checkpoints."""

from __future__ import annotations

from typing import Any

from torch import fx

from .graph import Captured
from .naming import draws_random

__all__ = ["computed_again"]


def computed_again(captured: Captured) -> dict[fx.Node, fx.Node]:
    """Nodes of the backward that are the same op on the same values as a node of the forward, and that node. Draws
    never are."""
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    forward: dict[int, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        alone = node.op != "call_function" or draws_random(node)
        key = object() if alone else (node.target, _part(node.args, numbers), _part(node.kwargs, numbers))
        numbers[node] = known.setdefault(key, len(known))
        if node not in captured.backward:
            forward.setdefault(numbers[node], node)
        elif numbers[node] in forward:
            found[node] = forward[numbers[node]]
    return found


def _part(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("#", numbers[value])
    if isinstance(value, (list, tuple)):
        return tuple(_part(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((key, _part(item, numbers)) for key, item in value.items())
    return (type(value).__name__, repr(value))

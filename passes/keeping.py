"""Kept parameters: between a parameter and its readers in both halves of a step stands a node that may hold it gathered
from the forward to the backward.

The node changes no value. Where its layout is that of the parameter, every reader gathers for itself, in the forward
and again in the backward; where it is gathered, one gather serves all (FSDP's reshard_after_forward=False).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..plans.marks import KEEP
from ..plans.plan import Node
from .graph import Captured, emit

__all__ = ["insert_keeps", "is_keep", "kept_once", "readers_of"]

_ALIAS = torch.ops.aten.alias.default


def insert_keeps(captured: Captured) -> None:
    """Put a node `path::keep` between each parameter that both the forward and the backward read and its readers, in
    place, right before the first of them."""
    for source, kept in captured.sources.items():
        readers = [user for user in source.users if user.op == "call_function"]
        halves = {user in captured.backward for user in readers}
        if kept.kind != "parameter" or len(halves) < 2:
            continue
        node = emit(captured.graph, min(readers), _ALIAS, (source,), source)
        for reader in readers:
            reader.replace_input_with(source, node)
        captured.names[node] = kept.name + KEEP


def is_keep(node: fx.Node) -> bool:
    """Whether `node` may hold a parameter gathered."""
    return node.target is _ALIAS


def kept_once(captured: Captured, lookup: Callable[[str], Node]) -> tuple[str, ...]:
    """The names of the nodes of `captured` that move their parameter: what they make depends on it alone, so that a
    step of several micro-batches needs it once."""
    names = [captured.names[node] for node in captured.ops() if is_keep(node)]
    return tuple(name for name in names if lookup(name).inputs[0].steps)


def readers_of(source: fx.Node) -> list[fx.Node]:
    """What reads a parameter or another value, by way of the node that may keep it too."""
    return [reader for user in source.users for reader in (user.users if is_keep(user) else (user,))]

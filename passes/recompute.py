"""Recomputation: which forward values are saved for the backward, and which are computed again from those.

`none`        every forward value that the backward reads is saved
`pointwise`   cheap values are computed again where that saves memory: a minimum cut, in bytes, between what is
expensive
              to compute and the backward; nearest to the backward among equals (as PyTorch's own partitioner does for
              compiled programs)
`block`       likewise, but everything inside a repeated block is cheap: little more than block inputs is saved

What a block hands to the next one is never recomputed, so that chains stay within a block. Random draws are saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Literal

import networkx as nx
import torch
from torch import fx

from .canonical import VIEWS
from .graph import Captured, emit, values_of
from .naming import draws_random, op_name

__all__ = ["RECOMPUTE", "Recompute", "recompute"]

Recompute = Literal["none", "pointwise", "block"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "pointwise", "block")
_CHEAP = {
    "sum", "amax", "amin", "full", "arange", "_to_copy", "native_layer_norm", "cat", "slice", "select",
    "constant_pad_nd", "scalar_tensor", "where", "tril", "triu", "getitem", "slice_scatter", "select_scatter",
    "flip", "repeat",
}  # fmt: skip


def recompute(
    captured: Captured,
    mode: Recompute,
    block_of: Callable[[fx.Node], str | None],
    again: Collection[str] | None = None,
) -> None:
    """Repeat in the backward of `captured`, in place, what `mode` computes again. `block_of` names the block of a
    node; `again` are the names of the nodes to repeat, where that was decided at other sizes."""
    if mode == "none":
        return
    if again is None:
        nodes = _computed_again(captured, mode, block_of)
    else:
        nodes = {n for n in captured.ops() if n not in captured.backward and captured.names[n] in again}
    captured.again = frozenset(captured.names[n] for n in nodes)
    if nodes:
        _repeat(captured, nodes)


def _computed_again(captured: Captured, mode: Recompute, block_of: Callable[[fx.Node], str | None]) -> set[fx.Node]:
    """Forward nodes on the backward's side of the cut."""
    forward = [n for n in captured.ops() if n not in captured.backward]
    cheap = {n for n in forward if _may_repeat(n, mode, block_of) and not _crosses(n, captured, block_of)}
    flow = nx.DiGraph()
    for node in forward:
        size = float(sum(v.numel() * v.element_size() for v in values_of(node) if v is not None)) or 1.0
        view = node.target in VIEWS or op_name(node) == "getitem"
        flow.add_edge((node, "in"), (node, "out"), capacity=math.inf if view and node in cheap else size)
        if node not in cheap:
            flow.add_edge("start", (node, "in"), capacity=math.inf)
        for source in node.all_input_nodes:
            if source.op == "call_function":
                flow.add_edge((source, "out"), (node, "in"), capacity=math.inf)
        if any(user in captured.backward for user in node.users):
            flow.add_edge((node, "out"), "end", capacity=math.inf)
    if "start" not in flow or "end" not in flow:
        return set()
    # On the reversed graph the source side of the cut is what the backward can do without saving: the smallest such
    # side.
    _, (near, _) = nx.minimum_cut(flow.reverse(copy=False), "end", "start")
    return {n for n in cheap if (n, "out") in near and (n, "in") in near}


def _may_repeat(node: fx.Node, mode: Recompute, block_of: Callable[[fx.Node], str | None]) -> bool:
    tags = getattr(node.target, "tags", ())
    if draws_random(node) or op_name(node) == "empty_strided":
        return False
    if mode == "block" and block_of(node) is not None:
        return True
    return torch.Tag.pointwise in tags or node.target in VIEWS or op_name(node) in _CHEAP


def _crosses(node: fx.Node, captured: Captured, block_of: Callable[[fx.Node], str | None]) -> bool:
    """Whether a block hands `node` on to another block or to the outside."""
    here = block_of(node)
    readers: Iterable[fx.Node] = (u for u in node.users if u.op == "call_function" and u not in captured.backward)
    return here is not None and any(block_of(reader) != here for reader in readers)


def _repeat(captured: Captured, again: set[fx.Node]) -> None:
    graph = captured.graph
    copies: dict[fx.Node, fx.Node] = {}
    for reader in [n for n in graph.nodes if n in captured.backward]:
        for source in list(reader.all_input_nodes):
            if source in again:
                reader.replace_input_with(source, _copy(graph, captured, source, reader, again, copies))
    _sink(set(copies.values()))


def _sink(nodes: set[fx.Node]) -> None:
    """Move each of `nodes`, and what is picked from its results, to right before its first reader: a reader that only
    picks a result may stand far ahead of where that is used."""
    picked = {user for node in nodes for user in node.users if op_name(user) == "getitem"}
    for node in sorted(nodes | picked, reverse=True):
        readers = [user for user in node.users if user.op == "call_function"]
        if readers:
            min(readers).prepend(node)


def _copy(
    graph: fx.Graph,
    captured: Captured,
    node: fx.Node,
    before: fx.Node,
    again: set[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> fx.Node:
    """The repetition of `node`, made before its first reader in the backward."""
    stack = [node]
    while stack:
        at = stack[-1]
        missing = [n for n in at.all_input_nodes if n in again and n not in copies]
        if at in copies or missing:
            stack.extend(missing)
            if at in copies:
                stack.pop()
            continue
        args, kwargs = fx.map_arg((at.args, at.kwargs), lambda n: copies.get(n, n))  # type: ignore[misc]
        copies[at] = emit(graph, before, at.target, args, at, kwargs)
        captured.backward.add(copies[at])
        stack.pop()
    return copies[node]

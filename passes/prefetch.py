"""Prefetch: the gather of a parameter is started one gather ahead of its use, and the reduction of a gradient is waited
for one reduction late, so that both run beside compute.

Only the order of nodes changes. All ranks move the same nodes, so collectives still meet in the same order.
"""

from __future__ import annotations

from torch import fx

__all__ = ["prefetch"]

_GATHER, _SCATTER, _REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


def prefetch(graph: fx.Graph) -> None:
    """Reorder `graph`, a forward or a backward half, in place."""
    _start_early(graph)
    _wait_late(graph)


def _opname(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def _start_early(graph: fx.Graph) -> None:
    """Move each gather that needs only what the half was given up to the wait of the gather before it."""
    given = {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    ready: set[fx.Node] = set(given)
    gathers: list[tuple[fx.Node, list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes or not all(n in ready for n in node.all_input_nodes):
            continue
        if _opname(node) == _GATHER:
            gathers.append((node, _chain(node, given)))
        elif _opname(node) in (_SCATTER, _REDUCE, "wait_tensor", "all_to_all_single"):
            continue
        else:
            ready.add(node)
    for (earlier, _), (_, chain) in zip(gathers, gathers[1:], strict=False):
        anchor = next(user for user in earlier.users if _opname(user) == "wait_tensor")
        at = anchor
        for node in chain:
            if at < node:
                at.append(node)
                at = node


def _chain(node: fx.Node, given: set[fx.Node]) -> list[fx.Node]:
    """`node` and the local ops between what is given and it, in order."""
    found: list[fx.Node] = []
    stack = [node]
    while stack:
        at = stack.pop()
        if at in given or at in found:
            continue
        found.append(at)
        stack.extend(at.all_input_nodes)
    return sorted(found)


def _wait_late(graph: fx.Graph) -> None:
    """Move the wait of each reduction whose result only leaves the graph down to the next such reduction, or the
    end."""
    end = next(iter(graph.find_nodes(op="output")))
    late: list[tuple[fx.Node, list[fx.Node]]] = []
    for node in graph.nodes:
        if _opname(node) in (_SCATTER, _REDUCE):
            tail = _tail(node, end)
            if tail:
                late.append((node, tail))
    if not late:
        return
    for index, (_, tail) in enumerate(late):
        after = late[index + 1][0] if index + 1 < len(late) else end.prev
        for node in tail:
            if node is not after:
                after.append(node)
                after = node


def _tail(node: fx.Node, end: fx.Node) -> list[fx.Node]:
    """What follows `node` when it leads to the output alone, without another collective."""
    found: list[fx.Node] = []
    at = node
    while True:
        users = list(at.users)
        if len(users) != 1:
            return []
        if users[0] is end:
            return found
        if users[0].all_input_nodes != [at] or _opname(users[0]) in (_SCATTER, _REDUCE, _GATHER, "all_to_all_single"):
            return []
        at = users[0]
        found.append(at)

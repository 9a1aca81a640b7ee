"""Stable names of nodes: the user's module path and the ordinal of the op within it, not FX node names.

`layers.3.attn.wq::einsum.0` is the first einsum that the module layers.3.attn.wq runs; `layers.3.attn.wq::bwd.einsum.1`
the second in its backward. A gradient that is summed from several uses belongs to the module of its first term.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from .graph import Captured

__all__ = ["name_nodes", "op_name"]


def op_name(node: fx.Node) -> str:
    """Short name of the op of a node: `aten.add.Tensor` is add, `mylib::combine` mylib.combine."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        space, _, name = str(packet).rpartition(".")
        return name if space == "aten" else f"{space}.{name}"
    return getattr(target, "__name__", str(target))


def name_nodes(captured: Captured) -> None:
    """Fill `captured.names`."""
    names: dict[fx.Node, str] = {node: source.name for node, source in captured.sources.items()}
    names |= {node: f"tangent.{index}" for index, node in captured.tangents.items()}
    counts: Counter[str] = Counter()
    paths: dict[fx.Node, str] = {}
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            names[node] = f"constant.{node.target}"
        if node.op != "call_function":
            continue
        paths[node] = _path(node, paths)
        key = f"{paths[node]}::{'bwd.' if node in captured.backward else ''}{op_name(node)}"
        names[node] = f"{key}.{counts[key]}"
        counts[key] += 1
    captured.names = names


def _path(node: fx.Node, paths: dict[fx.Node, str]) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        return list(stack)[-1]
    return next((paths[n] for n in node.all_input_nodes if n in paths), "")

"""Stable names of nodes: the user's module path and the ordinal of the op within it, not FX node names.

`layers.3.attn.wq::einsum.0` is the first einsum that the module layers.3.attn.wq runs; `layers.3.attn.wq::bwd.einsum.1`
the second in its backward. A gradient that is summed from several uses belongs to the module of its last term.
"""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import fx

from .graph import Captured, named_arguments

__all__ = ["block_name", "draws_random", "name_nodes", "op_name"]


def op_name(node: fx.Node) -> str:
    """Short name of the op of a node: `aten.add.Tensor` is add, `mylib::combine` mylib.combine."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        space, _, name = str(packet).rpartition(".")
        return name if space == "aten" else f"{space}.{name}"
    return getattr(target, "__name__", str(target))


def draws_random(node: fx.Node) -> bool:
    """Whether a node advances the random generator. Attention is tagged so, but without dropout it does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if "scaled_dot_product" not in op_name(node):
        return True
    return bool(named_arguments(node).get("dropout_p", 0.0))


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


def block_name(name: str) -> str | None:
    """The outermost numbered module that a node lies in: `layers.3` of `layers.3.attention.wq::einsum.0`.

    None outside of any.
    """
    match = re.match(r"(?:[^:.]+\.)*?\d+(?=[.:])", name)
    return match.group() if match else None


def _path(node: fx.Node, paths: dict[fx.Node, str]) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        return list(stack)[-1]
    return next((paths[n] for n in reversed(node.all_input_nodes) if n in paths), "")

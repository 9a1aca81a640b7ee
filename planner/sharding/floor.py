"""Bytes that every plan of a captured step takes on some device, told before anything is priced."""

from __future__ import annotations

from torch import fx

from ...passes.graph import Captured, values_of
from .folding import Blocks
from .op_costs import is_view
from .optimizers import Optimizer

__all__ = ["least_bytes"]


def least_bytes(captured: Captured, blocks: Blocks, optimizer: Optimizer, devices: int) -> float:
    """What is held when the backward begins, split over all `devices`: parameters with the state of `optimizer`, other
    sources, and the values of the forward that the backward reads."""
    total = 0.0
    for node, source in captured.sources.items():
        trained = source.kind == "parameter" and source.requires_grad
        total += _bytes(node) * blocks.share(source.name) * (1.0 + (optimizer.states if trained else 0.0))
    saved = {_base(n) for node in captured.backward for n in node.all_input_nodes if n not in captured.backward}
    total += sum(_bytes(node) * blocks.share(captured.names[node]) for node in saved if node.op == "call_function")
    return total / devices


def _base(node: fx.Node) -> fx.Node:
    """The value whose memory `node` is."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def _bytes(node: fx.Node) -> int:
    return sum(v.numel() * v.element_size() for v in values_of(node) if v is not None)

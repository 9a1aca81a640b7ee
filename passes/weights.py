"""A backward in two: first the gradients that another stage waits for, then those of the weights."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from .local import PASSED
from .split import copied

__all__ = ["TwoSteps", "in_two_steps", "keeping"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TwoSteps:
    """first(*inputs of the backward) gives (passed gradients..., kept...); then(*taken, *kept) gives the others.

    `taken` are the positions of those inputs that `then` reads too. Each gradient is in the order of the backward.
    """

    first: fx.Graph
    then: fx.Graph
    taken: tuple[int, ...]


def in_two_steps(backward: fx.Graph, gradients: Collection[str], passed: Collection[str]) -> TwoSteps:
    """Cut `backward`, which gives `gradients`, after the last of the marked nodes (see `passes.local.localize`): those
    that the gradients named in `passed` need."""
    nodes = list(backward.nodes)
    ends: Any = nodes[-1].args[0]
    inputs = [n for n in nodes if n.op == "placeholder"]
    constants = [n for n in nodes if n.op == "get_attr"]
    early = {n for n in nodes if n.op == "call_function" and n.meta.get(PASSED)}
    # What is kept is a tensor: one of several results of an op is taken from them before.
    early |= {n for n in nodes if n.target is operator.getitem and n.args[0] in early}
    late = [n for n in nodes if n.op == "call_function" and n not in early]
    sent = [n for name, n in zip(gradients, ends, strict=True) if name in passed]
    rest = [n for name, n in zip(gradients, ends, strict=True) if name not in passed]
    read = dict.fromkeys([*(a for n in late for a in n.all_input_nodes), *rest])
    kept = [n for n in read if n in early]
    taken = [n for n in inputs if n in read]
    return TwoSteps(
        first=copied([*constants, *(n for n in nodes if n in early)], inputs, (*sent, *kept)),
        then=copied([*constants, *late], [*taken, *kept], tuple(rest)),
        taken=tuple(inputs.index(n) for n in taken),
    )


def keeping(graph: fx.Graph, names: Sequence[str | None]) -> fx.Graph:
    """`graph` with one more input, a function of a name and a tensor. Results that have a name are handed to it as soon
    as they are made, and given no more."""
    made = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for node in inputs:
        known[node] = made.node_copy(node, lambda n: known[n])
    keep = made.placeholder("keep")
    ends: Any = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    due: dict[fx.Node, list[str]] = {}
    for name, node in zip(names, ends, strict=False):
        if name is not None:
            due.setdefault(node, []).append(name)
    for node in inputs:
        _hand(made, keep, known[node], due.get(node, ()))
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            known[node] = made.node_copy(node, lambda n: known[n])
            _hand(made, keep, known[node], due.get(node, ()))
    rest = [node for at, node in enumerate(ends) if at >= len(names) or names[at] is None]
    made.output(tuple(known[node] for node in rest))
    return made


def _hand(graph: fx.Graph, keep: fx.Node, node: fx.Node, names: Sequence[str]) -> None:
    for name in names:
        graph.call_function(_kept, (keep, name, node))


def _kept(keep: Callable[[str, torch.Tensor], None], name: str, gradient: torch.Tensor) -> None:
    keep(name, gradient)

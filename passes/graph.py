"""The captured program as a value: the joint graph, what goes in and out of it, and the names of its nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

import torch
from torch import fx

from . import _torch
from .attributes import Attribute
from .trees import Tree

__all__ = [
    "Captured",
    "Source",
    "SourceKind",
    "argument",
    "arguments",
    "emit",
    "named_arguments",
    "replace",
    "tensor_args",
    "value_of",
    "values_of",
]

SourceKind = Literal["parameter", "buffer", "constant", "input"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that goes into the program: shape (elements), dtype, and the user's own name for it."""

    kind: SourceKind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclasses.dataclass(slots=True, kw_only=True)
class Captured:
    """One training step. `names` maps every node to `module path::op.ordinal`, with `bwd.` before backward ops.

    tangents   by index of the output they belong to
    outputs    None where the output is not a tensor of the graph
    grads      by parameter or input name; absent where nothing flows
    mutations  the value a buffer or input holds after the step, by its name
    aliases    other names of a tied parameter or buffer, to the first name
    order      names of the sources by position in the captured call
    again      names of the forward nodes that the backward computes again
    attributes plain attributes of modules that were read
    """

    module: fx.GraphModule
    sources: dict[fx.Node, Source]
    tangents: dict[int, fx.Node]
    outputs: list[fx.Node | None]
    grads: dict[str, fx.Node]
    mutations: dict[str, fx.Node]
    aliases: dict[str, str]
    input_tree: Tree
    output_tree: Tree
    order: tuple[str, ...]
    names: dict[fx.Node, str]
    backward: set[fx.Node]
    again: frozenset[str] = frozenset()
    attributes: tuple[Attribute, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The joint graph."""
        return self.module.graph

    def copied(self) -> Captured:
        """The same step on a graph of its own."""
        new: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, new))
        return dataclasses.replace(
            self,
            module=fx.GraphModule(self.module, graph),
            sources={new[node]: source for node, source in self.sources.items()},
            tangents={index: new[node] for index, node in self.tangents.items()},
            outputs=[None if node is None else new[node] for node in self.outputs],
            grads={name: new[node] for name, node in self.grads.items()},
            mutations={name: new[node] for name, node in self.mutations.items()},
            names={new[node]: name for node, name in self.names.items() if node in new},
            backward={new[node] for node in self.backward if node in new},
        )

    def ops(self) -> list[fx.Node]:
        """The nodes that compute, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def results(self) -> list[fx.Node]:
        """Every node that leaves the graph."""
        return [n for n in (*self.outputs, *self.grads.values(), *self.mutations.values()) if n is not None]


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor a single-output node stands for."""
    return node.meta["val"]


def values_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The fake tensors of a node, one per output; None for an output that is no tensor."""
    value: Any = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(v if isinstance(v, torch.Tensor) else None for v in value)
    return (value if isinstance(value, torch.Tensor) else None,)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """Tensor inputs of a node in order of appearance, lists flattened, repeats kept."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)
    return [n for n in found if any(v is not None for v in values_of(n))]


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Positional arguments of a node, untyped: fx's own type admits everything an op can take."""
    return node.args


def argument(node: fx.Node, position: int, default: Any = None) -> Any:
    """Positional argument of a node, or the `default` of the op's schema where it is left out."""
    return node.args[position] if len(node.args) > position else default


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a node by the names of its op's schema; absent where the op's default holds."""
    return dict(zip(_torch.argument_names(node.target), node.args, strict=False)) | dict(node.kwargs)


def emit(
    graph: fx.Graph, before: fx.Node, target: Any, args: tuple, like: fx.Node, kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """Insert `target(*args)` before a node, with its fake value and the origin of `like`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs or {})
    values: Any = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    with _torch.fake_mode_of((values, like.meta["val"])) or contextlib.nullcontext():
        node.meta["val"] = target(*values[0], **values[1])
    for key in ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def replace(node: fx.Node, new: fx.Node) -> None:
    """Let every user of `node` read `new`, and erase `node`."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)

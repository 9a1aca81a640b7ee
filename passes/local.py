"""The local program: what one rank runs, the joint graph with local shapes and the collectives that the plan names.

Every rank's program has the same collectives in the same order; shapes differ where shards are uneven. Nothing is
decided here: layouts, steps and special local programs come from the plan's nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..plans.errors import MeshwrightError, ReplayError
from ..plans.layouts import REPLICATE, Layout, local_shape
from ..plans.marks import LATE
from ..plans.meshes import Mesh
from ..plans.plan import Edge, Node
from ..plans.steps import parse_step
from .attention import attention_elsewhere, attention_of_nothing
from .canonical import VIEWS
from .collectives import Emitter
from .graph import Captured, argument, arguments, tensor_args, values_of
from .keeping import is_keep
from .lowerings import LOWERINGS, Lowering
from .naming import op_name

__all__ = ["PASSED", "LocalProgram", "Lookup", "gathering", "local_op", "localize", "reduction", "shaped"]

aten = torch.ops.aten
Lookup = Callable[[str], Node]
# In the meta of nodes that gradients need which are passed on to another stage.
PASSED = "meshwright_passed"

# Position of the argument that holds the global shape of the output.
_SHAPE_ARGUMENT = {"reshape": 1, "expand": 1, "full": 0}
# Kernels that take their inputs to be laid out as a plain model would give them: pieces are packed first.
_PACKED = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "view_as_complex",
    "view_as_real",
    "embedding_dense_backward",
    "_embedding_bag",
    "_embedding_bag_backward",
    "max_pool2d_with_indices_backward",
    "transformers.grouped_mm_fallback",
    "transformers.grouped_mm_fallback_backward",
}


@dataclasses.dataclass(slots=True, kw_only=True)
class LocalProgram:
    """One rank's program. Placeholders in the order of `sources`, then `tangents`; results in the order of the names.

    graph       fx graph whose output is (outputs..., mutations..., gradients...)
    sources     names of the parameters, buffers, constants and inputs it takes
    tangents    indices of the outputs whose tangents it takes
    outputs, mutations, gradients   what it gives, by index or name
    constants   tensors that the graph reads by name
    late        where the gradients lie that are left as the backward makes them
    once        names of the kept parameters that it takes as they are kept, the last of its sources
    """

    graph: fx.Graph
    sources: tuple[str, ...]
    tangents: tuple[int, ...]
    outputs: tuple[int, ...]
    mutations: tuple[str, ...]
    gradients: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    backward: frozenset[fx.Node]
    needs: Mapping[str, frozenset[int]]
    late: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    once: tuple[str, ...] = ()


def localize(
    captured: Captured,
    lookup: Lookup,
    mesh: Mesh,
    coordinate: tuple[int, ...],
    groups: Sequence[str],
    *,
    device: torch.device | None = None,
    late: Collection[str] = (),
    passed: Collection[str] = (),
    once: Sequence[str] = (),
) -> LocalProgram:
    """The program of the rank at `coordinate`.

    `lookup` gives the plan's node of a name; `groups[a]` is the process group of mesh axis `a`; tensors that the
    program makes are made on `device` (the CPU by default). The gradients of `late` stay as the backward makes them:
    `reduction` is the rest of their way. Of the kept parameters named in `once` it is given what is kept: `gathering`
    makes that. Nodes that the gradients of `passed` need are marked (see passes/weights.py).
    Raises ReplayError when the plan lacks a node or does not fit the program.
    """
    emitter = Emitter(fx.Graph(), mesh, coordinate, groups, device)
    return _Localizer(captured, lookup, mesh, emitter, late, passed, tuple(once)).run()


def reduction(captured: Captured, lookup: Lookup, program: LocalProgram, emitter: Emitter) -> fx.Graph:
    """The way of the late gradients of `program`, in their order, from where they lie to where the plan wants them."""
    ends: list[fx.Node] = []
    for name, layout in program.late.items():
        value = values_of(captured.grads[name])[0]
        assert value is not None
        at = emitter.graph.placeholder(f"late_{len(ends)}")
        emitter.origin = (f"{name}::gradient", "move")
        for text in _only_input(lookup, f"{name}::gradient").steps:
            step = parse_step(text)
            after = emitter.after(step, layout)
            at, layout = emitter.step(step, at, layout, value), after
        ends.append(at)
    emitter.graph.output(tuple(ends))
    return emitter.graph


def gathering(captured: Captured, lookup: Lookup, program: LocalProgram, emitter: Emitter) -> fx.Graph:
    """The way of the parameters that `program` is given as they are kept, in their order, from where they lie."""
    named = {name: node for node, name in captured.names.items()}
    ends: list[fx.Node] = []
    for name in program.once:
        source = named[name].all_input_nodes[0]
        layout, value = lookup(captured.names[source]).outputs[0], values_of(source)[0]
        assert layout is not None and value is not None
        at = emitter.graph.placeholder(f"held_{len(ends)}")
        emitter.origin = (name, "gather")
        for text in _only_input(lookup, name).steps:
            step = parse_step(text)
            after = emitter.after(step, layout)
            at, layout = emitter.step(step, at, layout, value), after
        ends.append(at)
    emitter.graph.output(tuple(ends))
    return emitter.graph


class _Localizer:
    def __init__(
        self,
        captured: Captured,
        lookup: Lookup,
        mesh: Mesh,
        emitter: Emitter,
        late: Collection[str],
        passed: Collection[str],
        once: tuple[str, ...],
    ) -> None:
        self.captured, self.lookup, self.mesh, self.emitter = captured, lookup, mesh, emitter
        self.late, self.passed, self.once = late, passed, once
        self.given: dict[str, fx.Node] = {}
        self.reads: dict[str, list[fx.Node]] = {}
        self.local: dict[fx.Node, fx.Node] = {}
        self.layouts: dict[tuple[fx.Node, int], Layout] = {}
        self.done: dict[tuple, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.weights = _weights(captured)

    def run(self) -> LocalProgram:
        captured, graph = self.captured, self.emitter.graph
        for node in captured.sources:
            self._enter(node)
        self.given = {name: graph.placeholder(f"kept_{index}") for index, name in enumerate(self.once)}
        for node in captured.graph.nodes:
            if node.op in ("placeholder", "get_attr") and node not in captured.sources:
                self._enter(node)
        outputs, mutations = self._forward()
        boundary = set(graph.nodes)
        gradients = self._backward()
        graph.output((*outputs.values(), *mutations.values(), *gradients.values()))
        self._mark_passed()
        return LocalProgram(
            graph=graph,
            sources=(*(s.name for s in captured.sources.values()), *self.once),
            tangents=tuple(captured.tangents),
            outputs=tuple(outputs),
            mutations=tuple(mutations),
            gradients=tuple(gradients),
            constants=self.constants,
            backward=frozenset(n for n in graph.nodes if n not in boundary and n.op == "call_function"),
            needs={name: _tangents_of(node, captured) for name, node in captured.grads.items()},
            late={n: self.layouts[node, 0] for n, node in captured.grads.items() if n in self.late},
            once=self.once,
        )

    def _mark_passed(self) -> None:
        """Mark what the passed gradients need. It is told by the whole program: an op may read less on some ranks, and
        collectives must be on the same side everywhere."""
        stack = [node for name, node in self.captured.grads.items() if name in self.passed]
        near: list[fx.Node] = [self.local[node] for node in stack]
        near += [n for name in self.passed for n in self.reads.get(f"{name}::gradient", ())]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node not in self.captured.backward:
                continue
            seen.add(node)
            stack += node.all_input_nodes
            near += [self.local[node], *self.reads.get(self.captured.names[node], ())]
        while near:
            node = near.pop()
            if not node.meta.get(PASSED):
                node.meta[PASSED] = True
                near += node.all_input_nodes

    def _forward(self) -> tuple[dict[int, fx.Node], dict[str, fx.Node]]:
        """Outputs by index and mutations by name."""
        captured = self.captured
        for node in captured.ops():
            if node not in captured.backward:
                self._op(node, False)
        outputs = {i: self._result(n, f"output.{i}::output") for i, n in enumerate(captured.outputs) if n is not None}
        mutations = {name: self._result(n, f"{name}::update") for name, n in captured.mutations.items()}
        return outputs, mutations

    def _backward(self) -> dict[str, fx.Node]:
        """Gradients by name. One is reduced as soon as it is there, so that its whole does not stay alive; those
        that the plan wants late, when all are there."""
        captured = self.captured
        names: dict[fx.Node, list[str]] = {}
        for name, node in captured.grads.items():
            if self.lookup(f"{name}::gradient").rule != LATE:
                names.setdefault(node, []).append(name)
        gradients: dict[str, fx.Node] = {}
        for node in captured.ops():
            if node in captured.backward:
                self._op(node, True)
                gradients |= {name: self._result(node, f"{name}::gradient") for name in names.get(node, ())}
        for name, node in captured.grads.items():
            if name not in gradients:
                gradients[name] = self._result(node, f"{name}::gradient")
        return gradients

    def _enter(self, node: fx.Node) -> None:
        name = self.captured.names[node]
        if node.op == "get_attr":
            self.constants[str(node.target)] = getattr(self.captured.module, str(node.target))
            self.local[node] = self.emitter.graph.get_attr(str(node.target))
            self.layouts[node, 0] = (REPLICATE,) * self.mesh.ndim
            return
        self.local[node] = self.emitter.graph.placeholder(node.name)
        layout = self.lookup(name).outputs[0] if values_of(node)[0] is not None else None
        if layout is not None:
            self.layouts[node, 0] = layout

    def _op(self, node: fx.Node, backward: bool) -> None:
        if op_name(node) == "getitem":
            source, index = arguments(node)
            self.emitter.origin = (self.captured.names[source], "pick")
            self.local[node] = self.emitter.call(node.target, (self.local[source], index), like=node)
            if (source, index) in self.layouts:
                self.layouts[node, 0] = self.layouts[source, index]
            return
        name = self.captured.names[node]
        plan = self.lookup(name)
        inputs = tensor_args(node)
        if len(plan.inputs) != len(inputs) or plan.op != op_name(node):
            raise ReplayError(
                f"'plan' must fit the model, got {plan.op} with {len(plan.inputs)} inputs for {name}; plan again"
            )
        if name in self.given:
            assert plan.outputs[0] is not None
            self.local[node], self.layouts[node, 0] = self.given[name], plan.outputs[0]
            return
        pieces = iter([self._moved(n, edge, backward, name) for n, edge in zip(inputs, plan.inputs, strict=True)])
        whole = set(inputs)
        read = (node.args, node.kwargs)
        moved: Any = fx.map_arg(read, lambda n: next(pieces) if n in whole else self.local[n])
        args, kwargs = moved
        ins = [edge.layout for edge in plan.inputs]
        self.emitter.origin = (name, "op")
        if is_keep(node):
            self.local[node] = args[0]
        elif plan.rule:
            self.local[node] = self._lowered(node, args, kwargs, ins, plan)
        else:
            self.local[node] = local_op(self.emitter, node, args, kwargs, plan.outputs)
        for index, layout in enumerate(plan.outputs):
            if layout is not None:
                self.layouts[node, index] = layout

    def _lowered(self, node: fx.Node, args: tuple, kwargs: dict[str, Any], ins: list, plan: Node) -> fx.Node:
        """`node` run by the rule of its entry, which may be one for another op: a plan file says anything."""
        lowering = _lowering(plan.rule, plan.name)
        try:
            return lowering(self.emitter, node, args, kwargs, ins, plan.outputs)
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, MeshwrightError):
                raise
            raise ReplayError(
                f"'plan' must give {plan.name} a 'rule' that {plan.op} can run by, got {plan.rule[:60]!r} for layouts "
                f"{[list(layout or ()) for layout in plan.outputs]}; plan again"
            ) from error

    def _moved(self, node: fx.Node, edge: Edge, backward: bool, reader: str) -> fx.Node:
        """`node` brought to the layout of `edge` by its steps; common beginnings of ways are walked once per phase."""
        layout, at = self.layouts[node, 0], self.local[node]
        value = values_of(node)[0]
        assert value is not None
        way: tuple[str, ...] = ()
        self.emitter.origin = (reader, "gather" if node in self.weights else "move")
        for text in edge.steps:
            way = (*way, text)
            key = (node, way, backward)
            step = parse_step(text)
            after = self.emitter.after(step, layout)
            if key not in self.done:
                self.done[key] = self.emitter.step(step, at, layout, value)
            at, layout = self.done[key], after
        if layout != edge.layout and not _same_on_mesh(layout, edge.layout, self.mesh):
            start, end = ",".join(self.layouts[node, 0]), ",".join(edge.layout or ())
            raise ReplayError(
                f"'plan' must lead {edge.source} from {start} to {end} for {reader}, "
                f"got steps {list(edge.steps)}; plan again"
            )
        self.reads.setdefault(reader, []).append(at)
        return at

    def _result(self, node: fx.Node, name: str) -> fx.Node:
        if name.endswith("::gradient") and name.removesuffix("::gradient") in self.late:
            return self.local[node]
        return self._moved(node, _only_input(self.lookup, name), name.endswith("gradient"), name)


def _only_input(lookup: Lookup, name: str) -> Edge:
    """What the entry `name` of a result reads: the value that is given out."""
    inputs = lookup(name).inputs
    if len(inputs) != 1:
        raise ReplayError(
            f"'plan' must give {name} one input, the value that it is, got {len(inputs)} in its 'inputs'; plan again"
        )
    return inputs[0]


def _lowering(rule: str, name: str) -> Lowering:
    """The local program that the entry `name` asks for by its rule."""
    kind = rule.partition(":")[0]
    if kind not in LOWERINGS:
        raise ReplayError(
            f"'plan' must give {name} a 'rule' of {', '.join(sorted(LOWERINGS))} or none, got {rule[:60]!r}; plan again"
        )
    return LOWERINGS[kind]


def local_op(
    emitter: Emitter, node: fx.Node, args: tuple, kwargs: dict[str, Any], outs: Sequence[Layout | None]
) -> fx.Node:
    """Append the op of `node` on local pieces, its outputs in the layouts `outs`."""
    nothing = attention_of_nothing(node, outs, emitter.mesh.shape, emitter.coordinate, emitter.device)
    if nothing is not None:
        return emitter.call(*nothing, like=node)
    elsewhere = attention_elsewhere(node, args, kwargs) if emitter.device.type != "cpu" else None
    if elsewhere is not None:
        return emitter.call(*elsewhere, like=node)
    if op_name(node) in _PACKED:
        packed: Any = fx.map_arg((args, kwargs), emitter.packed)
        args, kwargs = packed
    if node.target is torch.ops.prims.var.default:
        # Inductor has no lowering for a correction by position.
        value, dims, *correction = args
        kwargs = {**kwargs, "correction": correction[0] if correction else 1}
        return emitter.call(torch.ops.aten.var.correction, (value, dims), kwargs, like=node)
    return emitter.call(node.target, shaped(node, args, outs, emitter.mesh, emitter.coordinate), kwargs, like=node)


def shaped(node: fx.Node, args: tuple, outs: Sequence[Layout | None], mesh: Mesh, coordinate: tuple[int, ...]) -> tuple:
    """The arguments of `node` with global sizes replaced by those of the rank at `coordinate`."""
    short = op_name(node)
    if short == "convolution_backward":
        if not args[3] or outs[2] is None:
            return args
        return (*args[:3], list(local_shape(args[3], outs[2], mesh.shape, coordinate)), *args[4:])
    position = _SHAPE_ARGUMENT.get(short)
    if position is None and "upsample" in short and short.endswith("_backward"):
        position = 2  # the size of what was resized
    if position is None:
        return args
    value, layout = values_of(node)[0], outs[0]
    assert value is not None and layout is not None
    return (*args[:position], list(local_shape(value.shape, layout, mesh.shape, coordinate)), *args[position + 1 :])


def _weights(captured: Captured) -> set[fx.Node]:
    """The parameters, and what views and casts make of them."""
    found = {node for node, source in captured.sources.items() if source.kind == "parameter"}
    for node in captured.ops():
        if (node.target in VIEWS or op_name(node) == "_to_copy") and argument(node, 0) in found:
            found.add(node)
    return found


def _same_on_mesh(left: Layout, right: Layout | None, mesh: Mesh) -> bool:
    """Whether layouts differ only along axes of one device, where nothing has to move."""
    return right is not None and all(a == b or n == 1 for a, b, n in zip(left, right, mesh.shape, strict=True))


def _tangents_of(node: fx.Node, captured: Captured) -> frozenset[int]:
    """Outputs whose tangents a gradient depends on."""
    where = {n: i for i, n in captured.tangents.items()}
    seen: set[fx.Node] = set()
    stack, found = [node], set()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        if at in where:
            found.add(where[at])
        stack.extend(at.all_input_nodes)
    return frozenset(found)

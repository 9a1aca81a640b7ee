"""The oracle of sharding rules: run one op on pieces as a strategy says, put them together, compare with the op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from meshwright.passes.capture import capture
from meshwright.passes.collectives import Emitter
from meshwright.passes.graph import Captured, tensor_args
from meshwright.passes.local import local_op
from meshwright.passes.lowerings import LOWERINGS
from meshwright.passes.naming import draws_random
from meshwright.passes.simulate import piece, run_ranks
from meshwright.passes.trees import flatten_call
from meshwright.planner.sharding.strategies import Strategy
from meshwright.plans.layouts import Layout, is_partial, local_range, local_shape
from meshwright.plans.meshes import Mesh

__all__ = ["captured_values", "reference_values", "strategy_error", "term"]


def captured_values(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Captured, dict[fx.Node, Any]]:
    """`model` captured, and every node's value on its real tensors and on random tangents."""
    captured = capture(model, args, dict(kwargs))
    inputs = dict(zip(captured.input_tree.names, flatten_call(args, kwargs)[0], strict=True))
    given = [inputs[s.name] if s.kind == "input" else held_by(model, s.name) for s in captured.sources.values()]
    generator = torch.Generator().manual_seed(0)
    for node in captured.tangents.values():
        like = node.meta["val"]
        given.append(torch.randn(like.shape, dtype=like.dtype, generator=generator))
    with torch.no_grad():
        return captured, reference_values(captured, [tensor.detach() for tensor in given])


def held_by(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter, buffer or tensor attribute of a model with the dotted `name`."""
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), key)


def reference_values(captured: Captured, inputs: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """Every node's value when the joint graph runs on whole tensors."""
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = getattr(captured.module, node.target)
        elif node.op == "call_function":
            # What is drawn depends on how the memory that it fills is laid out.
            take = (lambda n: env[n]) if draws_random(node) else (lambda n: contiguous(env[n]))
            args, kwargs = fx.map_arg((node.args, node.kwargs), take)
            env[node] = node.target(*args, **kwargs)
    return env


def contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def strategy_error(node: fx.Node, strategy: Strategy, mesh: Mesh, env: Mapping[fx.Node, Any]) -> float:
    """Largest error of `node` run by `strategy` on simulated ranks, relative to the largest element of its value in
    `env`; infinite where pieces have another shape or dtype, or only one of them is not a number."""
    inputs = tensor_args(node)
    graphs = [local_graph(node, strategy, mesh, coordinate) for coordinate in mesh.coordinates()]
    given = [
        [term(env[n], layout, mesh, coordinate) for n, layout in zip(inputs, strategy.ins, strict=True)]
        for coordinate in mesh.coordinates()
    ]
    results = [outputs_of(r[0]) for r in run_ranks(graphs, given, mesh, {})]
    errors = [
        error_of(want, [r[i] for r in results], layout, mesh)
        for i, (want, layout) in enumerate(zip(outputs_of(env[node]), strategy.outs, strict=True))
        if layout is not None
    ]
    return max(errors)


def outputs_of(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def local_graph(node: fx.Node, strategy: Strategy, mesh: Mesh, coordinate: tuple[int, ...]) -> fx.Graph:
    """`node` alone as the rank at `coordinate` runs it, a placeholder per tensor input."""
    inputs = tensor_args(node)
    graph = fx.Graph()
    emitter = Emitter(graph, mesh, coordinate, [f"axis:{axis}" for axis in range(mesh.ndim)])
    holes = iter([graph.placeholder(f"x{i}") for i in range(len(inputs))])
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(holes) if n in inputs else n)
    if strategy.local:
        out = LOWERINGS[strategy.local](emitter, node, args, kwargs, strategy.ins, strategy.outs)
    else:
        out = local_op(emitter, node, args, kwargs, strategy.outs)
    graph.output((out,))
    return graph


def term(tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> torch.Tensor:
    """A rank's piece. Of a pending reduction a random term, drawn apart for each element, so that a rule that needs the
    whole is caught: the terms of a sum have both signs, and another rank holds each element of a maximum or minimum."""
    part = piece(tensor, layout, mesh, coordinate)
    for axis, placement in enumerate(layout):
        count, index = mesh.shape[axis], coordinate[axis]
        if not is_partial(placement) or count == 1:
            continue
        generator = torch.Generator().manual_seed(axis)
        if placement == "P(sum)":
            others = [noise(part, generator) for _ in range(count - 1)]
            part = others[index - 1] if index else part - sum(others)
        else:
            holder = torch.randint(count, part.shape, generator=generator)
            below = part - 1 - noise(part, generator).abs()
            above = part + 1 + noise(part, generator).abs()
            part = torch.where(holder == index, part, below if placement == "P(max)" else above)
    return part


def noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)
    return torch.randint(-3, 4, like.shape, dtype=like.dtype, generator=generator)


def error_of(want: torch.Tensor, pieces: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> float:
    """Error of the whole of `pieces`, one per rank, and of every copy against the first."""
    shapes = [local_shape(want.shape, layout, mesh.shape, coordinate) for coordinate in mesh.coordinates()]
    if any(tuple(p.shape) != s or p.dtype != want.dtype for p, s in zip(pieces, shapes, strict=True)):
        return float("inf")
    firsts: dict[tuple, torch.Tensor] = {}
    worst = 0.0
    for coordinate, part in zip(mesh.coordinates(), pieces, strict=True):
        key = tuple(i if p != "R" else 0 for i, p in zip(coordinate, layout, strict=True))
        worst = max(worst, gap(firsts.setdefault(key, part), part))
    return max(worst, gap(want, whole_of(firsts, want, layout, mesh)))


def whole_of(
    pieces: Mapping[tuple[int, ...], torch.Tensor], like: torch.Tensor, layout: Layout, mesh: Mesh
) -> torch.Tensor:
    """The whole tensor of pieces by mesh position, partial terms reduced."""
    reduce = {"P(sum)": torch.add, "P(max)": torch.maximum, "P(min)": torch.minimum}
    op = next((reduce[p] for p in layout if is_partial(p)), None)
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)
    filled = torch.zeros(like.shape, dtype=torch.bool)
    for coordinate, part in pieces.items():
        ranges = [local_range(n, d, layout, mesh.shape, coordinate) for d, n in enumerate(like.shape)]
        place = tuple(slice(start, start + length) for start, length in ranges)
        out[place] = part if op is None else torch.where(filled[place], op(out[place], part), part)
        filled[place] = True
    return out


def gap(want: torch.Tensor, have: torch.Tensor) -> float:
    """Largest difference, relative to the largest finite element of `want` if that is over 1."""
    if want.numel() == 0 or torch.equal(want, have):
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return float("inf")
    same = (want == have) | (want.isnan() & have.isnan())
    difference = torch.where(same, torch.zeros_like(want), want - have).abs()
    scale = max(1.0, float(want.abs().nan_to_num(0, 0, 0).max()))
    return float(difference.nan_to_num(float("inf")).max()) / scale

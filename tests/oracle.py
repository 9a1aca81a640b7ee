"""The oracle of sharding rules: run one op on pieces as a strategy says, put the results together, compare with the op."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from meshwright.passes.collectives import Emitter
from meshwright.passes.graph import tensor_args, values_of
from meshwright.passes.local import local_op
from meshwright.passes.lowerings import LOWERINGS
from meshwright.passes.simulate import piece, run_ranks
from meshwright.planner.strategies import Strategy
from meshwright.plans.layouts import Layout, is_partial, local_range
from meshwright.plans.meshes import Mesh


def reference_values(captured, inputs):
    """Every node's value when the joint graph runs on whole tensors."""
    env = {}
    feed = iter(inputs)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = getattr(captured.module, node.target)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.contiguous(), (args, kwargs))
            env[node] = node.target(*args, **kwargs)
    return env


def strategy_error(node, strategy: Strategy, mesh: Mesh, env) -> float:
    """Largest relative error of `node` run by `strategy`, against its value in `env`."""
    graphs, given = [], []
    names = [f"axis:{a}" for a in range(mesh.ndim)]
    inputs = tensor_args(node)
    for coordinate in mesh.coordinates():
        graph = fx.Graph()
        emitter = Emitter(graph, mesh, coordinate, names)
        holes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
        feed = iter(holes)
        whole = set(inputs)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(feed) if n in whole else n)
        if strategy.local:
            out = LOWERINGS[strategy.local](emitter, node, args, kwargs, strategy.ins, strategy.outs)
        else:
            out = local_op(emitter, node, args, kwargs, strategy.outs)
        graph.output((out,))
        graphs.append(graph)
        given.append([term(env[n], layout, mesh, coordinate) for n, layout in zip(inputs, strategy.ins)])
    results = [r[0] for r in run_ranks(graphs, given, mesh, {})]
    results = [r if isinstance(r, (tuple, list)) else (r,) for r in results]
    want = env[node] if isinstance(env[node], (tuple, list)) else (env[node],)
    return max(_error(want[i], whole_of([r[i] for r in results], want[i], layout, mesh)) for i, layout in enumerate(strategy.outs) if layout)


def term(tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate) -> torch.Tensor:
    """A rank's piece; of a partial sum a random share, so that a rule that needs the sum is caught."""
    part = piece(tensor, layout, mesh, coordinate)
    for axis, placement in enumerate(layout):
        count, index = mesh.shape[axis], coordinate[axis]
        if is_partial(placement) and count > 1:
            if placement == "P(sum)" and (part.is_floating_point() or part.is_complex()):
                generator = torch.Generator().manual_seed(axis)
                shares = torch.rand(count, generator=generator, dtype=torch.float64)
                part = part * float(shares[index] / shares.sum())
            elif placement == "P(sum)":
                part = part if index == 0 else torch.zeros_like(part)
            elif part.is_floating_point():
                part = part if index == 1 else part - 1.0 if placement == "P(max)" else part + 1.0
    return part


def whole_of(pieces, like: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The whole tensor, partial terms reduced."""
    ops = {p for p in layout if is_partial(p)}
    start = {"P(max)": float("-inf"), "P(min)": float("inf")}.get(next(iter(ops), ""), 0)
    out = torch.full_like(like, start) if ops & {"P(max)", "P(min)"} else torch.zeros_like(like)
    seen = set()
    for coordinate, part in zip(mesh.coordinates(), pieces):
        place = tuple(local_range(n, d, layout, mesh.shape, coordinate) for d, n in enumerate(like.shape))
        key = tuple(i if p != "R" else 0 for i, p in zip(coordinate, layout))
        if key in seen:
            continue
        seen.add(key)
        view = out
        for dim, (first, length) in enumerate(place):
            view = view.narrow(dim, first, length)
        if "P(sum)" in ops:
            view += part
        elif ops:
            view.copy_((torch.maximum if "P(max)" in ops else torch.minimum)(view, part))
        else:
            view.copy_(part)
    return out


def _error(want: torch.Tensor, have: torch.Tensor) -> float:
    if want.shape != have.shape:
        return float("inf")
    if want.numel() == 0 or torch.equal(want, have):
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return float("inf")
    same = torch.isclose(want, have, equal_nan=True) | (want == have)
    gap = torch.where(same, torch.zeros_like(want), want - have).abs()
    return float(gap.nan_to_num(float("inf")).max() / max(1.0, float(want.abs().nan_to_num(0, 0, 0).max())))


def outputs_of(node):
    """Which outputs of a node are tensors."""
    return [v is not None for v in values_of(node)]

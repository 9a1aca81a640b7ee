"""Simulated ranks: the local programs of a whole mesh in one process, in lockstep, collectives computed exactly.

Each rank runs until its next collective and waits there; when every rank waits, the collectives are carried out. A
rank that waits for another collective than its group is an error that names both: the deadlock a cluster would have.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..plans.errors import CheckError
from ..plans.layouts import Layout, is_partial, local_range, shard_dim
from ..plans.meshes import Mesh

__all__ = ["assemble", "piece", "run_ranks"]

_COLLECTIVES = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}
Request = tuple[str, torch.Tensor, tuple]


def run_ranks(
    graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Any]], mesh: Mesh, constants: Mapping[str, torch.Tensor]
) -> list[tuple]:
    """Results of every rank's graph on its `inputs`. `graphs[r]` was localised with groups named 'axis:a'."""
    ranks = [_run(graph, list(given), constants) for graph, given in zip(graphs, inputs, strict=True)]
    results: list[Any] = [None] * len(ranks)
    waiting: dict[int, Request] = {}
    # Every rank draws the numbers that one device would: each starts from the same generator state.
    state, states = torch.random.get_rng_state(), {}
    for rank in range(len(ranks)):
        _advance(rank, None, ranks, waiting, results, states, state)
    while waiting:
        if len(waiting) < len(ranks):
            raise CheckError(f"ranks {sorted(set(range(len(ranks))) - set(waiting))} ended while others wait for {waiting[min(waiting)][0]}")
        answers = _carry_out(waiting, mesh)
        for rank, answer in answers.items():
            _advance(rank, answer, ranks, waiting, results, states, state)
    torch.random.set_rng_state(states[0])
    return results


def _advance(rank: int, answer: Any, ranks: Sequence[Generator], waiting: dict, results: list, states: dict, state: Any) -> None:
    torch.random.set_rng_state(states.get(rank, state))
    try:
        waiting[rank] = ranks[rank].send(answer)
    except StopIteration as stop:
        waiting.pop(rank, None)
        results[rank] = stop.value
    states[rank] = torch.random.get_rng_state()


def _run(graph: fx.Graph, given: list[Any], constants: Mapping[str, torch.Tensor]) -> Generator[Request, torch.Tensor, tuple]:
    env: dict[fx.Node, Any] = {}
    last = {n: node for node in graph.nodes for n in node.all_input_nodes}
    feed = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = constants[node.target]
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])  # type: ignore[return-value]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])  # type: ignore[misc]
            name = getattr(node.target, "_opname", "")
            if name in _COLLECTIVES:
                env[node] = yield name, args[0], tuple(args[1:])
            elif name == "wait_tensor":
                env[node] = args[0]
            else:
                env[node] = node.target(*args, **kwargs)
        for n in node.all_input_nodes:
            if last[n] is node and n.op != "placeholder":
                env.pop(n, None)
    raise AssertionError("graph without output")


def _carry_out(waiting: Mapping[int, Request], mesh: Mesh) -> dict[int, torch.Tensor]:
    answers: dict[int, torch.Tensor] = {}
    for rank, (kind, _, rest) in waiting.items():
        if rank in answers:
            continue
        axis = int(rest[-1].split(":")[1])
        group = mesh.group(axis, mesh.coordinate(rank))
        for other in group:
            if waiting[other][0] != kind or waiting[other][2] != rest:
                raise CheckError(f"rank {rank} waits for {kind}{rest} of its group while rank {other} waits for {waiting[other][0]}")
        pieces = [waiting[other][1] for other in group]
        if len({tuple(p.shape) for p in pieces}) != 1:
            raise CheckError(f"{kind} over ranks {group} must have equal pieces, got {[tuple(p.shape) for p in pieces]}")
        for index, other in enumerate(group):
            answers[other] = _collective(kind, pieces, index, rest)
    return answers


def _collective(kind: str, pieces: Sequence[torch.Tensor], index: int, rest: tuple) -> torch.Tensor:
    if kind == "all_gather_into_tensor":
        return torch.cat(list(pieces))
    if kind == "all_to_all_single":
        return torch.cat([p.chunk(len(pieces))[index] if p.shape[0] else p for p in pieces])
    stacked = torch.stack(list(pieces))
    op = rest[0]
    total = stacked.sum(0, dtype=stacked.dtype) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0)
    return total.chunk(len(pieces))[index].clone() if kind == "reduce_scatter_tensor" else total


def piece(tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The piece of `tensor` at a mesh position, contiguous and apart from it."""
    for dim in range(tensor.dim()):
        start, length = local_range(tensor.shape[dim], dim, layout, mesh.shape, coordinate)
        tensor = tensor.narrow(dim, start, length)
    return tensor.clone(memory_format=torch.contiguous_format)


def assemble(pieces: Sequence[torch.Tensor], shape: Sequence[int], layout: Layout, mesh: Mesh, what: str) -> torch.Tensor:
    """The global tensor of every rank's piece; CheckError when copies that should be equal are not."""
    if any(is_partial(p) for p in layout):
        raise CheckError(f"{what} must not be left as a partial sum, got {','.join(layout)}")
    whole = pieces[0].new_empty(tuple(shape))
    seen: dict[tuple, torch.Tensor] = {}
    for coordinate, part in zip(mesh.coordinates(), pieces, strict=True):
        place = tuple(local_range(n, d, layout, mesh.shape, coordinate) for d, n in enumerate(shape))
        if tuple(part.shape) != tuple(length for _, length in place):
            raise CheckError(f"{what} must have a piece of shape {[n for _, n in place]} at {coordinate}, got {tuple(part.shape)}")
        key = tuple(i if shard_dim(p) is not None else 0 for i, p in zip(coordinate, layout, strict=True))
        if key in seen and not torch.equal(seen[key], part) and not torch.allclose(seen[key], part, rtol=1e-12, atol=0, equal_nan=True):
            raise CheckError(f"{what} must be equal on devices that hold copies of it, got different values at {coordinate}")
        seen[key] = part
        view = whole
        for dim, (start, length) in enumerate(place):
            view = view.narrow(dim, start, length)
        view.copy_(part)
    return whole

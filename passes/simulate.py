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
from . import _torch

__all__ = ["assemble", "piece", "run_ranks"]

# A rank's next collective: its kind, this rank's piece, the other arguments, the group last.
Request = tuple[str, torch.Tensor, tuple]
Rank = Generator[Request, Any, tuple]


def run_ranks(
    graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Any]], mesh: Mesh, constants: Mapping[str, torch.Tensor]
) -> list[tuple]:
    """Results of every rank's graph on its `inputs`. `graphs[r]` was localised with groups named 'axis:a'.

    Raises CheckError when ranks of one group wait for different collectives, or one ends while others wait.
    """
    ranks = [_run(graph, list(given), constants) for graph, given in zip(graphs, inputs, strict=True)]
    lockstep = _Lockstep(ranks)
    for rank in range(len(ranks)):
        lockstep.advance(rank, None)
    while lockstep.waiting:
        waiting = dict(lockstep.waiting)
        ended = sorted(set(range(len(ranks))) - set(waiting))
        if ended:
            first = min(waiting)
            raise CheckError(f"ranks {ended} ended while others wait: rank {first} for {waiting[first][0]}")
        for rank, answer in _carry_out(waiting, mesh).items():
            lockstep.advance(rank, answer)
    torch.random.set_rng_state(lockstep.states[0])
    return lockstep.results


class _Lockstep:
    """The ranks and where each stands. Each draws the numbers that one device would: all start from one state."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.results: list[Any] = [None] * len(ranks)
        self.waiting: dict[int, Request] = {}
        self.states = dict.fromkeys(range(len(ranks)), torch.random.get_rng_state())

    def advance(self, rank: int, answer: Any) -> None:
        """Run `rank` until its next collective, or to its end."""
        torch.random.set_rng_state(self.states[rank])
        try:
            self.waiting[rank] = self.ranks[rank].send(answer)
        except StopIteration as stop:
            self.waiting.pop(rank, None)
            self.results[rank] = stop.value
        self.states[rank] = torch.random.get_rng_state()


def _run(graph: fx.Graph, given: list[Any], constants: Mapping[str, torch.Tensor]) -> Rank:
    env: dict[fx.Node, Any] = {}
    last = {n: node for node in graph.nodes for n in node.all_input_nodes}
    feed = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = constants[node.target]
        elif node.op == "output":
            results: Any = fx.map_arg(node.args[0], lambda n: env[n])
            return results
        else:
            held: Any = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            args, kwargs = held
            kind = _torch.COLLECTIVES.get(node.target)
            if kind is not None:
                env[node] = yield kind, args[0], tuple(args[1:])
            elif node.target is _torch.functional.wait_tensor.default:
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
        group = mesh.group(int(rest[-1].split(":")[1]), mesh.coordinate(rank))
        for other in group:
            its_kind, _, its_rest = waiting[other]
            if (its_kind, its_rest) != (kind, rest):
                raise CheckError(
                    f"ranks of a group must wait for one collective, got {kind}{rest} on rank {rank} and "
                    f"{its_kind}{its_rest} on rank {other}"
                )
        pieces = [waiting[other][1] for other in group]
        if len({(tuple(p.shape), p.dtype) for p in pieces}) != 1:
            shapes = [(tuple(p.shape), str(p.dtype)) for p in pieces]
            raise CheckError(f"{kind} over ranks {group} must have equal pieces, got {shapes}")
        for index, other in enumerate(group):
            answers[other] = _collective(kind, pieces, index, rest)
    return answers


def _collective(kind: str, pieces: Sequence[torch.Tensor], index: int, rest: tuple) -> torch.Tensor:
    """What the rank at `index` of a group gets."""
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


def assemble(
    pieces: Sequence[torch.Tensor], shape: Sequence[int], layout: Layout, mesh: Mesh, what: str
) -> torch.Tensor:
    """The global tensor of `shape` (elements) of every rank's piece, in rank order.

    Raises CheckError, which names `what`, when a piece has another shape than `layout` says, when a sum is pending,
    and when copies that should be equal are not.
    """
    if any(is_partial(p) for p in layout):
        raise CheckError(f"{what} must not be left as a partial sum, got {','.join(layout)}")
    whole = pieces[0].new_empty(tuple(shape))
    seen: dict[tuple, torch.Tensor] = {}
    for coordinate, part in zip(mesh.coordinates(), pieces, strict=True):
        place = tuple(local_range(n, d, layout, mesh.shape, coordinate) for d, n in enumerate(shape))
        lengths = tuple(length for _, length in place)
        if tuple(part.shape) != lengths:
            raise CheckError(f"{what} must have a piece of shape {lengths} at {coordinate}, got {tuple(part.shape)}")
        key = tuple(i if shard_dim(p) is not None else 0 for i, p in zip(coordinate, layout, strict=True))
        if key in seen and not _agree(seen[key], part):
            raise CheckError(
                f"{what} must be equal on devices that hold copies of it, got different values at {coordinate}"
            )
        seen[key] = part
        view = whole
        for dim, (start, length) in enumerate(place):
            view = view.narrow(dim, start, length)
        view.copy_(part)
    return whole


def _agree(left: torch.Tensor, right: torch.Tensor) -> bool:
    inexact = left.is_floating_point() or left.is_complex()
    return torch.equal(left, right) or (inexact and torch.allclose(left, right, rtol=1e-12, atol=0, equal_nan=True))

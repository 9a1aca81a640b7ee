"""A migration carried out: pieces go from rank to rank over the running process group, packed, round by round.

What a rank keeps is copied; what it receives is written where it belongs; the donors' tensors are only read. So a
migration that fails half-way has harmed nothing but its own targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..plans.errors import CheckError
from ..plans.migration import Box, Migration, Move

__all__ = ["Part", "transfer"]

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this rank holds, or will hold, of a tensor: the elements of `box`, in `local`, of the same lengths."""

    box: Box
    local: torch.Tensor

    def view(self, box: Box, what: str) -> torch.Tensor:
        """The elements of `box`, which must lie within this part."""
        tensor = self.local
        if tuple(tensor.shape) != tuple(length for _, length in self.box):
            raise CheckError(f"{what} must have a piece of the shape of {self.box}, got {tuple(tensor.shape)}")
        for dim, ((start, length), (first, held)) in enumerate(zip(box, self.box, strict=True)):
            if start < first or start + length > first + held:
                raise CheckError(f"{what} must hold {box} to give it, got a piece {self.box}")
            tensor = tensor.narrow(dim, start - first, length)
        return tensor


def transfer(
    migration: Migration,
    sources: Mapping[str, Part],
    targets: Mapping[str, Part],
    *,
    me: int,
    ranks: Sequence[int],
    device: torch.device | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Fill `targets` from the `sources` of all ranks, as `migration` says. All ranks of the default process group call
    this; `ranks` are the migration's ranks in the order of the group, `me` this one.

    Messages are made on `device` (the CPU by default), none larger than `chunk_bytes` unless one piece is. Raises
    CheckError when a piece is not what the migration takes it for, RuntimeError when a rank is lost.
    """
    at = {rank: index for index, rank in enumerate(ranks)}
    mine = [move for move in migration.moves if me in (move.donor, move.receiver)]
    outgoing: dict[int, list[Move]] = {}
    incoming: dict[int, list[Move]] = {}
    for move in mine:
        if move.donor == move.receiver:
            _target(targets, move).copy_(sources[move.name].view(move.box, move.name))
        elif move.donor == me:
            outgoing.setdefault(move.receiver, []).append(move)
        else:
            incoming.setdefault(move.donor, []).append(move)
    sends = {rank: list(_messages(moves, chunk_bytes)) for rank, moves in outgoing.items()}
    receives = {rank: list(_messages(moves, chunk_bytes)) for rank, moves in incoming.items()}
    rounds = max((len(messages) for messages in (*sends.values(), *receives.values())), default=0)
    for turn in range(rounds):
        ops: list[dist.P2POp] = []
        arriving: list[tuple[list[Move], torch.Tensor]] = []
        for rank in ranks:
            if turn < len(sends.get(rank, ())):
                packed = [_bytes(sources[m.name].view(m.box, m.name), device) for m in sends[rank][turn]]
                ops.append(dist.P2POp(dist.isend, torch.cat(packed), at[rank], tag=turn))
            if turn < len(receives.get(rank, ())):
                moves = receives[rank][turn]
                buffer = torch.empty(sum(m.size_bytes for m in moves), dtype=torch.uint8, device=device)
                ops.append(dist.P2POp(dist.irecv, buffer, at[rank], tag=turn))
                arriving.append((moves, buffer))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for moves, buffer in arriving:
            for move, data in zip(moves, buffer.split([m.size_bytes for m in moves]), strict=True):
                view = _target(targets, move)
                # A view of another dtype needs bytes that begin where an element may.
                view.copy_(data.clone().view(view.dtype).view(view.shape))


def _messages(moves: Sequence[Move], limit: int) -> Iterator[list[Move]]:
    """`moves` in messages of at most `limit` bytes; donor and receiver cut alike."""
    message: list[Move] = []
    size = 0
    for move in moves:
        if message and size + move.size_bytes > limit:
            yield message
            message, size = [], 0
        message.append(move)
        size += move.size_bytes
    if message:
        yield message


def _bytes(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.to(device) if device is not None else flat


def _target(targets: Mapping[str, Part], move: Move) -> torch.Tensor:
    return targets[move.name].view(move.box, move.name)

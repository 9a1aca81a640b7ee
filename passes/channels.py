"""Tensors between pipeline ranks: between two of them, in each direction, the first sent is the first received.

Directions are process groups apart, so that a receive that waits never holds up a send. So are the coordinates of the
stages' meshes where these are alike: a rank sends its piece to the rank with the same coordinate. Between different
meshes any rank may send to any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .handover import Part, part_of, put_part
from .stage_work import Expected

__all__ = ["Channels", "Receiving"]


class Receiving:
    """Tensors on their way to this rank, in parts; those that arrive apart are put in their places."""

    def __init__(self, tensors: list[torch.Tensor], arriving: list[_Arriving], timeout: timedelta) -> None:
        self._tensors, self._arriving, self._timeout = tensors, arriving, timeout

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there; RuntimeError when the time is up or the peer is gone."""
        for one in self._arriving:
            _wait(one.work, self._timeout)
            if one.part.box is not None:
                put_part(self._tensors[one.number], one.part, one.data)
        self._arriving.clear()
        return self._tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arriving:
    """A part of tensor `number`: what is waited for, and the memory that it comes to."""

    work: Any
    number: int
    part: Part
    data: torch.Tensor


class Channels:
    """What joins pipeline rank `rank` to the others. All processes make theirs at once: those in `processes[r]` are
    the devices of pipeline rank r, and this one is number `index` of its rank. Where ranks lie on different meshes
    (`mixed`), each device may send to each. `among_others`: there are processes besides, that make no groups now."""

    def __init__(
        self,
        processes: Sequence[Sequence[int]],
        rank: int,
        *,
        index: int,
        device: torch.device,
        timeout_s: float,
        mixed: bool = False,
        among_others: bool = False,
    ) -> None:
        self.processes, self.rank, self.index = processes, rank, index
        self._among_others = among_others
        self.timeout, self.device = timedelta(seconds=timeout_s), device
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        everyone = tuple(range(len(processes)))
        make = self._all if mixed else partial(self.group, everyone)
        # To higher ranks, and to lower ones.
        self._ways = [make(), make()]

    def _all(self) -> dist.ProcessGroup | None:
        return dist.new_group([one for row in self.processes for one in row], timeout=self.timeout)  # type: ignore[return-value]

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A process group of those pipeline ranks, which have equally many devices, at this coordinate, None on others;
        called by all processes."""
        if self._among_others:
            # Others make other groups meanwhile, or none.
            if self.rank not in ranks:
                return None
            members = [self.processes[rank][self.index] for rank in ranks]
            alone: Any = dist.new_group(members, timeout=self.timeout, use_local_synchronization=True)
            return alone
        found = None
        for index in range(len(self.processes[ranks[0]])):
            made = dist.new_group([self.processes[rank][index] for rank in ranks], timeout=self.timeout)
            found = made if index == self.index and self.rank in ranks else found
        return found  # type: ignore[return-value]

    def send(self, tensors: Iterable[torch.Tensor], parts: Iterable[Sequence[Part]], other: int) -> None:
        """Hand the `parts` of each of `tensors` over to pipeline rank `other`; they are kept until they are there."""
        self._check_open()
        for tensor, some in zip(tensors, parts, strict=True):
            for part in some:
                data = _bytes(part_of(tensor, part))
                if data.numel():
                    to = self.processes[other][part.index]
                    self._sending.append((dist.isend(data, dst=to, group=self._ways[other < self.rank]), data))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, expected: Iterable[Expected], other: int) -> Receiving:
        """Begin to receive from pipeline rank `other`."""
        self._check_open()
        tensors: list[torch.Tensor] = []
        arriving: list[_Arriving] = []
        for number, one in enumerate(expected):
            tensor = torch.empty(one.shape, dtype=one.dtype, device=self.device)
            tensors.append(tensor)
            for part in one.parts:
                data = tensor if part.box is None else tensor.new_empty([length for _, length in part.box])
                if data.numel():
                    source = self.processes[other][part.index]
                    work = dist.irecv(_bytes(data), src=source, group=self._ways[self.rank < other])
                    arriving.append(_Arriving(work=work, number=number, part=part, data=data))
        return Receiving(tensors, arriving, self.timeout)

    def finish(self) -> None:
        """Wait until all that was sent is there."""
        while self._sending:
            work, _ = self._sending.popleft()
            _wait(work, self.timeout)

    def _check_open(self) -> None:
        if None in self._ways:
            raise RuntimeError("an earlier step failed and cut the channels between the ranks; apply the plan again")

    def close(self) -> None:
        """Cut all channels: a rank that waits at the other end meets an error at once."""
        self._sending.clear()
        for group in self._ways:
            if group is not None:
                dist.destroy_process_group(group)
        self._ways = [None, None]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order: every backend carries bytes, and nothing else carries every dtype."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element counts as contiguous with any stride.
    return (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _wait(work: Any, timeout: timedelta) -> None:
    if work is not None and not work.wait(timeout):
        raise RuntimeError(f"nothing came within {timeout.total_seconds():g} s")

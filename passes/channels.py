"""Tensors between pipeline ranks: one channel for each direction of each pair, in which the first sent is the first
received.

Directions are apart, so that a receive that waits never holds up a send, and so are the coordinates of the stages'
meshes: a rank sends its piece to the rank with the same coordinate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .stage_work import Expected

__all__ = ["Channels", "Receiving"]


class Receiving:
    """Tensors on their way to this rank."""

    def __init__(self, tensors: list[torch.Tensor], works: list[Any], timeout: timedelta) -> None:
        self._tensors, self._works, self._timeout = tensors, works, timeout

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there; RuntimeError when the time is up or the peer is gone."""
        for work in self._works:
            _wait(work, self._timeout)
        return self._tensors


class Channels:
    """What joins pipeline rank `rank` to those that hold neighbouring stages. All ranks make theirs at once.

    `placement[stage]` is the pipeline rank of a stage; `size` is how many processes a pipeline rank has and `index`
    which of them this one is.
    """

    def __init__(
        self, placement: Sequence[int], rank: int, *, size: int, index: int, device: torch.device, timeout_s: float
    ) -> None:
        self.timeout, self.device = timedelta(seconds=timeout_s), device
        self._peer = {other: other * size + index for other in placement}
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        for pair in sorted(_pairs(placement)):
            if rank in pair:
                ranks = sorted(self._peer[end] for end in pair)
                group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True)
                assert isinstance(group, dist.ProcessGroup)
                self._groups[pair] = group
        self.rank = rank

    def send(self, tensors: Iterable[torch.Tensor], other: int) -> None:
        """Hand `tensors` over to pipeline rank `other`; they are kept until they are there."""
        for tensor in tensors:
            data = _bytes(tensor.resolve_conj().contiguous())
            if data.numel():
                work = dist.isend(data, dst=self._peer[other], group=self._groups[self.rank, other])
                self._sending.append((work, data))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, expected: Iterable[Expected], other: int) -> Receiving:
        """Begin to receive from pipeline rank `other`."""
        tensors, works = [], []
        for one in expected:
            tensor = torch.empty(one.shape, dtype=one.dtype, device=self.device)
            tensors.append(tensor)
            if tensor.numel():
                group = self._groups[other, self.rank]
                works.append(dist.irecv(_bytes(tensor), src=self._peer[other], group=group))
        return Receiving(tensors, works, self.timeout)

    def finish(self) -> None:
        """Wait until all that was sent is there."""
        while self._sending:
            work, _ = self._sending.popleft()
            _wait(work, self.timeout)

    def close(self) -> None:
        """Cut all channels: a rank that waits at the other end meets an error at once."""
        self._sending.clear()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


def _pairs(placement: Sequence[int]) -> set[tuple[int, int]]:
    """Ordered pairs of ranks that hold neighbouring stages."""
    near = {pair for pair in zip(placement, placement[1:], strict=False) if pair[0] != pair[1]}
    return near | {(b, a) for a, b in near}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: every backend carries bytes, and nothing else carries every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _wait(work: Any, timeout: timedelta) -> None:
    if work is not None and not work.wait(timeout):
        raise RuntimeError(f"nothing came within {timeout.total_seconds():g} s")

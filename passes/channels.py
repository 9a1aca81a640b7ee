"""Tensors between pipeline ranks: between two of them, in each direction, the first sent is the first received.

Directions are process groups apart, so that a receive that waits never holds up a send, and so are the coordinates of
the stages' meshes: a rank sends its piece to the rank with the same coordinate.
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
    """What joins pipeline rank `rank` of `ranks` to the others. All processes make theirs at once: a pipeline rank has
    `size` of them, and this one is its number `index`. `processes`: which of all they are, where there are others."""

    def __init__(
        self,
        ranks: int,
        rank: int,
        *,
        size: int,
        index: int,
        device: torch.device,
        timeout_s: float,
        processes: Sequence[int] | None = None,
    ) -> None:
        self.ranks, self.rank, self.size, self.index = ranks, rank, size, index
        self._processes = processes
        self.timeout, self.device = timedelta(seconds=timeout_s), device
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        everyone = tuple(range(ranks))
        # To higher ranks, and to lower ones.
        self._ways = [self.group(everyone), self.group(everyone)]

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A process group of those pipeline ranks at this coordinate, None on others; called by all processes."""
        if self._processes is not None:
            # Others make other groups meanwhile, or none.
            if self.rank not in ranks:
                return None
            made: Any = dist.new_group(
                [self._process(rank) for rank in ranks], timeout=self.timeout, use_local_synchronization=True
            )
            return made
        found = None
        for index in range(self.size):
            made = dist.new_group([rank * self.size + index for rank in ranks], timeout=self.timeout)
            found = made if index == self.index and self.rank in ranks else found
        return found  # type: ignore[return-value]

    def _process(self, rank: int) -> int:
        """The process of a pipeline rank at this coordinate."""
        at = rank * self.size + self.index
        return at if self._processes is None else self._processes[at]

    def send(self, tensors: Iterable[torch.Tensor], other: int) -> None:
        """Hand `tensors` over to pipeline rank `other`; they are kept until they are there."""
        self._check_open()
        for tensor in tensors:
            data = _bytes(tensor)
            if data.numel():
                work = dist.isend(data, dst=self._process(other), group=self._ways[other < self.rank])
                self._sending.append((work, data))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, expected: Iterable[Expected], other: int) -> Receiving:
        """Begin to receive from pipeline rank `other`."""
        self._check_open()
        tensors, works = [], []
        for one in expected:
            tensor = torch.empty(one.shape, dtype=one.dtype, device=self.device)
            tensors.append(tensor)
            if tensor.numel():
                source = self._process(other)
                works.append(dist.irecv(_bytes(tensor), src=source, group=self._ways[self.rank < other]))
        return Receiving(tensors, works, self.timeout)

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

"""What a change of arrangement moves: bytes of state that devices lack, where they come from, and in what time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...plans import Arrangement, Health
from .fetching import ROW, fetched, holding, listed
from .job import Job

__all__ = ["StateMove", "state_move", "state_moves"]

# A group, and the layers from its first to before its end.
_Stage = tuple[tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """moved_bytes: from device to device. missing_bytes: no living device holds them; read from a checkpoint.

    seconds: of the slowest device, all sending and receiving at once on their own links.
    """

    moved_bytes: float
    missing_bytes: float
    seconds: float


def state_move(job: Job, before: Arrangement, after: Arrangement, health: Health) -> StateMove:
    """From where the state lies under `before` to where `after` needs it. Dead devices give nothing.

    A piece comes from a device of the same node if one has it, else from those that have it in turn.
    """
    (move,) = state_moves(job, before, [after], health)
    return move


def state_moves(job: Job, before: Arrangement, afters: Sequence[Arrangement], health: Health) -> list[StateMove]:
    """`state_move` to each of several arrangements."""
    kept = set(_stages(before))
    holders = _Holders(job, kept, set(health.dead))
    return [holders.move([stage for stage in _stages(after) if stage not in kept]) for after in afters]


class _Holders:
    """Which living devices hold which part of each layer."""

    def __init__(self, job: Job, stages: set[_Stage], dead: set[int]) -> None:
        self.job = job
        degrees = sorted({len(group) for group, _, _ in stages})
        ends = sorted({(index / degree, (index + 1) / degree) for degree in degrees for index in range(degree)})
        numbers = {part: number for number, part in enumerate(ends)}
        rows = [
            (device, low, high, numbers[index / len(group), (index + 1) / len(group)])
            for group, low, high in sorted(stages)
            for index, device in enumerate(group)
            if device not in dead
        ]
        held = _table(rows)
        self.node_of = np.arange(job.devices) // job.devices_per_node
        self.parts = np.array(ends, float).reshape(len(ends), 2)
        self.sizes = np.array(job.state_bytes, float)
        self.own = np.full((job.devices, job.layers), -1, np.int32)
        self.counts = np.zeros((job.layers, len(ends)), np.int64)
        self.nearest = np.full((job.layers, len(ends), int(self.node_of[-1]) + 1), -1, np.int32)
        holding(held, self.node_of, self.own, self.counts, self.nearest)
        sums = np.cumsum(self.counts.ravel())
        self.firsts = (sums - self.counts.ravel()).reshape(self.counts.shape)
        self.donors = np.zeros(max(1, int(sums[-1])), np.int32)
        listed(held, self.firsts, np.zeros_like(self.counts), self.donors)

    def move(self, stages: Sequence[_Stage]) -> StateMove:
        """What the devices of these stages have to get."""
        job = self.job
        rows = [(device, low, high, 0) for group, low, high in stages for device in group]
        lows = [index / len(group) for group, _, _ in stages for index in range(len(group))]
        highs = [(index + 1) / len(group) for group, _, _ in stages for index in range(len(group))]
        near, far, given, missing = (np.zeros(job.devices) for _ in range(4))
        fetched(
            _table(rows), np.array(lows, float), np.array(highs, float), self.parts, self.sizes, self.node_of, self.own,
            self.counts, self.nearest, self.firsts, self.donors, np.zeros_like(self.counts), near, far, given, missing,
        )  # fmt: skip
        taken = near / job.intra_bytes_per_s + far / job.inter_bytes_per_s
        seconds = (taken.max(), given.max() / job.inter_bytes_per_s, missing.max() / job.storage_bytes_per_s)
        return StateMove(
            moved_bytes=math.fsum(near) + math.fsum(far), missing_bytes=math.fsum(missing), seconds=float(max(seconds))
        )


def _table(rows: Sequence[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(len(rows), ROW)


def _stages(arrangement: Arrangement) -> Iterator[_Stage]:
    for replica in arrangement.replicas:
        cuts = [0, *itertools.accumulate(replica.layers)]
        for group, low, high in zip(replica.groups, cuts, cuts[1:], strict=False):
            if group:
                yield group, low, high

"""What a change of arrangement moves: bytes of state that devices lack, where they come from, and in what time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...plans import Arrangement, Health
from .job import Job

__all__ = ["StateMove", "state_move", "state_moves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """moved_bytes: from device to device. missing_bytes: no living device holds them; read from a checkpoint.

    seconds: of the slowest device, all sending and receiving at once on their own links.
    """

    moved_bytes: float
    missing_bytes: float
    seconds: float


# Shares of a layer below this are rounding.
_LEAST = 1e-9


def state_move(job: Job, before: Arrangement, after: Arrangement, health: Health) -> StateMove:
    """From where the state lies under `before` to where `after` needs it. Dead devices give nothing.

    A piece comes from a device of the same node if one has it, else from those that have it in turn.
    """
    (move,) = state_moves(job, before, [after], health)
    return move


def state_moves(job: Job, before: Arrangement, afters: Sequence[Arrangement], health: Health) -> list[StateMove]:
    """`state_move` to each of several arrangements."""
    kept = {(group, low, high) for group, low, high in _stages(before)}
    holders = _Holders(job, kept, set(health.dead))
    return [_moved(job, kept, holders, after) for after in afters]


def _moved(job: Job, kept: set[tuple[tuple[int, ...], int, int]], holders: _Holders, after: Arrangement) -> StateMove:
    traffic = _Traffic(job)
    holders.turns.clear()
    for group, low, high in _stages(after):
        if (group, low, high) in kept:
            continue
        for index, device in enumerate(group):
            part = (index / len(group), (index + 1) / len(group))
            for layer in range(low, high):
                if holders.own.get((device, layer)) != part:
                    holders.fetch(layer, device, part, job.state_bytes[layer], traffic)
    return traffic.move()


class _Traffic:
    """Bytes that each device takes in from its node and from others, gives to other nodes, and finds nowhere."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.near: dict[int, float] = {}
        self.far: dict[int, float] = {}
        self.given: dict[int, float] = {}
        self.missing: dict[int, float] = {}

    def add(self, donor: int, device: int, size: float) -> None:
        """A piece that a device gets from another."""
        if self.job.node(donor) == self.job.node(device):
            self.near[device] = self.near.get(device, 0.0) + size
        else:
            self.far[device] = self.far.get(device, 0.0) + size
            self.given[donor] = self.given.get(donor, 0.0) + size

    def move(self) -> StateMove:
        """What it all comes to."""
        job = self.job
        devices = self.near.keys() | self.far.keys()
        seconds = [
            self.near.get(d, 0.0) / job.intra_bytes_per_s + self.far.get(d, 0.0) / job.inter_bytes_per_s
            for d in devices
        ]
        seconds += [size / job.inter_bytes_per_s for size in self.given.values()]
        seconds += [size / job.storage_bytes_per_s for size in self.missing.values()]
        return StateMove(
            moved_bytes=math.fsum(self.near.values()) + math.fsum(self.far.values()),
            missing_bytes=math.fsum(self.missing.values()),
            seconds=max(seconds, default=0.0),
        )


class _Holders:
    """Which living devices hold which part of each layer."""

    def __init__(self, job: Job, stages: set[tuple[tuple[int, ...], int, int]], dead: set[int]) -> None:
        self.job = job
        self.parts: dict[int, dict[tuple[float, float], list[int]]] = {}
        self.own: dict[tuple[int, int], tuple[float, float]] = {}
        self.nodes: dict[tuple[int, tuple[float, float]], dict[int, int]] = {}
        self.turns: dict[tuple[int, tuple[float, float]], int] = {}
        for group, low, high in sorted(stages):
            for index, device in enumerate(group):
                if device in dead:
                    continue
                part = (index / len(group), (index + 1) / len(group))
                for layer in range(low, high):
                    self.parts.setdefault(layer, {}).setdefault(part, []).append(device)
                    self.own[device, layer] = part
                    self.nodes.setdefault((layer, part), {}).setdefault(job.node(device), device)
        self.sorted = {layer: sorted(parts) for layer, parts in self.parts.items()}

    def fetch(self, layer: int, device: int, part: tuple[float, float], size: float, traffic: _Traffic) -> None:
        """Get what a device lacks of its part of a layer."""
        own = self.own.get((device, layer), (0.0, 0.0))
        for low, high in ((part[0], min(part[1], own[0])), (max(part[0], own[1]), part[1])):
            at = low
            while at < high - _LEAST:
                held = next(
                    (one for one in self.sorted.get(layer, ()) if one[0] <= at + _LEAST and one[1] > at + _LEAST), None
                )
                if held is None:
                    after = [one[0] for one in self.sorted.get(layer, ()) if one[0] > at]
                    end = min([high, *after])
                    traffic.missing[device] = traffic.missing.get(device, 0.0) + (end - at) * size
                else:
                    end = min(high, held[1])
                    traffic.add(self._donor(layer, held, device), device, (end - at) * size)
                at = end

    def _donor(self, layer: int, held: tuple[float, float], device: int) -> int:
        near = self.nodes[layer, held].get(self.job.node(device))
        if near is not None:
            return near
        donors = self.parts[layer][held]
        turn = self.turns.get((layer, held), 0)
        self.turns[layer, held] = turn + 1
        return donors[turn % len(donors)]


def _stages(arrangement: Arrangement) -> Iterator[tuple[tuple[int, ...], int, int]]:
    for replica in arrangement.replicas:
        cuts = [0, *itertools.accumulate(replica.layers)]
        for group, low, high in zip(replica.groups, cuts, cuts[1:], strict=False):
            if group:
                yield group, low, high

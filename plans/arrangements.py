"""How a job of pipelines lies on its devices when they are not all alike: each replica with groups of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from .errors import RequestError

__all__ = ["Arrangement", "Replica"]


class Replica(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pipeline: the devices of each stage, its layers, and how many micro-batches of a step begin here.

    A group is empty where its stage is done by other replicas (see `Arrangement.loads`).
    """

    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    microbatches: int

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices of the replica, stage by stage."""
        return tuple(device for group in self.groups for device in group)


class Arrangement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All replicas. loads: None, or for each stage how many micro-batches each replica's group does of all, where
    micro-batches pass from one replica to another between stages; all replicas then have the same layers."""

    replicas: tuple[Replica, ...]
    loads: tuple[tuple[int, ...], ...] | None = None

    @property
    def microbatches(self) -> int:
        """Micro-batches of one step."""
        return sum(replica.microbatches for replica in self.replicas)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices at work, ascending."""
        return tuple(sorted(self._devices()))

    def _devices(self) -> Iterator[int]:
        for replica in self.replicas:
            yield from replica.devices

    def check(self, layers: int) -> None:
        """RequestError unless every layer is in one stage of every replica and every device in one group at most."""
        devices = list(self._devices())
        if len(set(devices)) != len(devices):
            raise RequestError(f"'groups' must have each device once, got {len(devices) - len(set(devices))} again")
        for replica in self.replicas:
            if len(replica.groups) != len(replica.layers) or sum(replica.layers) != layers or min(replica.layers) < 1:
                raise RequestError(
                    f"'layers' must be at least 1 for each of {len(replica.groups)} stages and {layers} in all, got "
                    f"{replica.layers}"
                )
            if self.loads is None and (not all(replica.groups) or replica.microbatches < 1):
                raise RequestError("'groups' must have devices and micro-batches, got an empty one without loads")
        if self.loads is not None:
            self._check_loads(self.loads)

    def _check_loads(self, loads: tuple[tuple[int, ...], ...]) -> None:
        for stage, row in enumerate(loads):
            if len(row) != len(self.replicas) or sum(row) != self.microbatches or min(row) < 0:
                raise RequestError(f"'loads' must share {self.microbatches} micro-batches at stage {stage}, got {row}")
            if any(count and not replica.groups[stage] for count, replica in zip(row, self.replicas, strict=True)):
                raise RequestError(f"'loads' must give no work to a group without devices, got {row} at stage {stage}")
        if len({replica.layers for replica in self.replicas}) != 1:
            raise RequestError("'layers' must be those of all replicas where micro-batches pass between them")

    def digest(self) -> str:
        """A sha256 by which survivors see that they mean the same arrangement."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

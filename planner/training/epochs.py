"""What supervisors and processes tell each other through the store: events up, epochs of membership down.

Every process has a number for its life; one that comes back gets a new one. The first supervisor reads events in order
and publishes epochs, each with all its members. A later epoch replaces the earlier ones:

    urgent       a process is lost: leave the step now
    not urgent   a change that was asked for: leave at the end of the step that all agree on
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

__all__ = [
    "IDLE",
    "Beat",
    "Epoch",
    "Event",
    "Store",
    "beat_key",
    "node_key",
    "epoch_at",
    "event_at",
    "post",
    "publish",
    "seen",
]

# The stage of a process that lives and has no part in the plan.
IDLE = "idle"

Kind = Literal["node", "ready", "lost", "running", "done", "left", "drain", "add", "note", "slow"]
T = TypeVar("T", bound=Struct)


class Store(Protocol):
    """What is needed of torch.distributed.TCPStore."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Epoch(Struct, frozen=True, kw_only=True):
    """Who trains from now on; `leaving` hand over what they hold and go; `speeds` of those that are slow."""

    number: int
    members: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    urgent: bool = False
    reason: str = ""
    speeds: dict[int, float] = {}


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened to `who`, a process (or, for a node, its supervisor)."""

    kind: Kind
    who: int
    text: str = ""
    value: int = 0


class Beat(Struct, frozen=True, kw_only=True):
    """A sign of life: how many came before, steps done, where in a step the process is, collectives issued per group,
    and the last of them while it waits."""

    count: int
    done: int = 0
    stage: str = ""
    issued: dict[str, int] = {}
    last: str = ""


def beat_key(who: int) -> str:
    """Where process `who` leaves its signs of life."""
    return f"beat/{who}"


def node_key(node: int, what: str) -> str:
    """Where supervisor `node` leaves its signs of life, or finds its orders."""
    return f"node/{node}/{what}"


def post(store: Store, event: Event) -> None:
    """Append an event; events are read in the order in which they got their numbers."""
    number = store.add("events", 1)
    store.set(f"event/{number}", msgspec.json.encode(event).decode())


def event_at(store: Store, number: int) -> Event | None:
    """Event `number`, from 1; None while it is not there."""
    return _read(store, f"event/{number}", Event)


def publish(store: Store, epoch: Epoch) -> None:
    """Make `epoch` known."""
    store.set(f"epoch/{epoch.number}", msgspec.json.encode(epoch).decode())


def epoch_at(store: Store, number: int) -> Epoch | None:
    """Epoch `number`, from 1; None while it is not published."""
    return _read(store, f"epoch/{number}", Epoch)


def seen(store: Store, key: str, kind: type[T]) -> T | None:
    """What was last set at `key`."""
    return _read(store, key, kind)


def _read(store: Any, key: str, kind: type[T]) -> T | None:
    return msgspec.json.decode(store.get(key), type=kind) if store.check([key]) else None

"""The thread by which a process hears of new epochs while its main thread is blocked, and shows that it lives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...plans.errors import RequestError
from .. import _torch
from .epochs import Beat, Epoch, Event, beat_key, epoch_at, post
from .fence import Fence

__all__ = ["STORE", "WHO", "Superseded", "Watch", "connect", "supervised"]

# The environment that a supervisor gives its processes.
STORE, WHO = "MESHWRIGHT_STORE", "MESHWRIGHT_RANK"
_POLL_S = 0.02
_BEAT_S = 0.25


def supervised(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where the supervisor's store is, and the number of this process; RequestError without a supervisor."""
    if STORE not in environment or WHO not in environment:
        raise RequestError(
            "'elastic' must run under a supervisor, got none; start the script with `meshwright run --nproc N SCRIPT`"
        )
    return environment[STORE], int(environment[WHO])


class Superseded(RuntimeError):
    """The epoch that this process was entering has been replaced."""


def connect(address: str, timeout_s: float = 60.0) -> TCPStore:
    """A connection of its own to the store at host:port."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except (ValueError, RuntimeError) as error:
        raise RequestError(f"'store' must be host:port of a running supervisor, got {address!r}: {error}") from error


class Watch:
    """What this process knows of the job. Only the watching thread writes `epochs` (by number, from 1) and
    `urgent`, the last one that is."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.address, self.me = supervised(environment)
        self.store = connect(self.address)
        self.fence = Fence()
        self.epochs: dict[int, Epoch] = {}
        self.urgent = 0
        # Written by the main thread: the epoch it is in, and what the signs of life say.
        self.epoch = 0
        self.done, self.stage = 0, "start"
        self.groups: dict[str, Any] = {}
        self.gone = False
        self._beaten = threading.Event()
        threading.Thread(target=self._run, name="meshwright-watch", daemon=True).start()

    def tell(self, kind: Any, text: str = "", value: int = 0) -> None:
        """Post an event of this process."""
        post(self.store, Event(kind=kind, who=self.me, text=text, value=value))

    def check(self) -> None:
        """Superseded when a process was lost since this epoch began."""
        if self.urgent > self.epoch:
            raise Superseded(f"epoch {self.epoch} was replaced by {self.urgent}")

    def until(self, holds: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until something holds, or so long; Superseded when the epoch is replaced meanwhile."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while not holds():
            self.check()
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(_POLL_S / 2)
        return True

    def _run(self) -> None:
        try:
            store = connect(self.address)
            beats, beaten, before = 0, 0.0, None
            while True:
                found = epoch_at(store, len(self.epochs) + 1)
                if found is not None:
                    self.epochs[found.number] = found
                    if found.urgent:
                        self.urgent = found.number
                    continue
                if self.urgent > self.epoch:
                    # Again and again: the main thread may be opening connections to one that is gone.
                    self.fence.shut()
                    _torch.abort_communicators()
                if time.monotonic() - beaten > _BEAT_S:
                    beaten, beats = time.monotonic(), beats + 1
                    before = self._beat(store, beats, before)
                time.sleep(_POLL_S)
        except Exception as error:  # without its supervisor nobody would free this process or miss it
            if not self.gone:
                os.write(2, f"meshwright: the supervisor is gone ({type(error).__name__}): giving up\n".encode())
                os._exit(1)

    def _beat(self, store: Any, count: int, before: Beat | None) -> Beat:
        issued = {name: _torch.issued(group) for name, group in list(self.groups.items())}
        beat = Beat(count=count, done=self.done, stage=self.stage, issued=issued)
        if (
            before is not None
            and (before.done, before.issued) == (beat.done, issued)
            and self.stage in ("step", "gate")
        ):
            beat = msgspec.structs.replace(beat, last=before.last or _torch.last_collective())
        store.set(beat_key(self.me), msgspec.json.encode(beat).decode())
        return beat

"""How a process is got out of a collective whose peer is gone.

Gloo waits for its timeout unless its sockets are closed: `abort` does nothing for it. So the sockets that were opened
while groups were made are remembered, and shut when the word comes; every collective on them fails at once. NCCL's
communicators are aborted by PyTorch. Linux only: sockets are found in /proc.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...plans.errors import RequestError

__all__ = ["Fence"]


class Fence:
    """The sockets of the process groups of one epoch. `shut` may be called from any thread, at any time."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise RequestError(
                f"'elastic' must run on Linux, got {sys.platform}; use torchrun and checkpoints elsewhere"
            )
        self._lock = threading.Lock()
        self._before: set[str] | None = None
        self._ours: set[str] = set()

    @contextmanager
    def around(self) -> Iterator[None]:
        """What is opened within belongs to the process groups."""
        with self._lock:
            self._before = set(_sockets())
        try:
            yield
        finally:
            with self._lock:
                self._ours |= set(_sockets()) - (self._before or set())
                self._before = None

    def shut(self) -> int:
        """Shut them; how many there were. Again and again while groups may still be made."""
        with self._lock:
            now = _sockets()
            ours = set(now) & self._ours if self._before is None else set(now) - self._before | self._ours & set(now)
            return sum(_shut(now[inode]) for inode in ours)

    def forget(self) -> None:
        """The groups are gone; sockets that stay open in PyTorch are nobody's any more."""
        with self._lock:
            self._ours.clear()


def _sockets() -> dict[str, int]:
    """The open sockets of this process, by inode, with a descriptor of each."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


def _shut(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as other:
            if other.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # gloo's listener ends the process when its socket is shut
            other.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # closed meanwhile, or shut before

"""The processes of one machine: forked from a parent that has loaded torch once, gone when it goes.

The store is a process of its own, so that no rank's death takes it away and the parent stays without threads, from
which it is safe to fork at any time.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...plans.errors import MeshwrightError, RequestError
from .watch import STORE, WHO

__all__ = ["Child", "Processes", "exit_words", "forked", "start_store"]

_PR_SET_PDEATHSIG = 1


def forked(work: Callable[[], int]) -> int:
    """The process id of a child that does `work` and ends with the exit code that it gives."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def start_store(host: str, port: int) -> tuple[int, int]:
    """The process id and port of a new store that listens on `host`; RequestError when it cannot."""
    reading, writing = os.pipe()

    def serve() -> int:
        os.close(reading)
        store = TCPStore(host, port, None, True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        os.close(writing)
        while True:
            signal.pause()

    child = forked(serve)
    os.close(writing)
    told = os.read(reading, 16)
    os.close(reading)
    if not told:
        os.waitpid(child, 0)
        raise RequestError(f"'listen' must be an address of this machine with a free port, got {host}:{port}")
    return child, int(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that trains: its number for life, and its place on this machine."""

    who: int
    slot: int
    pid: int


class Processes:
    """The training processes of this machine; with `loopback` all of the job's are on it."""

    def __init__(self, script: str, arguments: Sequence[str], address: str, *, loopback: bool) -> None:
        self.script, self.arguments, self.address, self.loopback = script, tuple(arguments), address, loopback
        self.alive: dict[int, Child] = {}
        # Loaded once, before the forks: what every script of the job loads.
        importlib.import_module(".elastic", __package__)

    def start(self, who: int, slot: int) -> None:
        """Start process `who`."""
        self.alive[who] = Child(who=who, slot=slot, pid=forked(lambda: self._work(who, slot)))

    def _work(self, who: int, slot: int) -> int:
        os.environ.update({STORE: self.address, WHO: str(who), "LOCAL_RANK": str(slot)})
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "16")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if self.loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        sys.argv = [self.script, *self.arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(self.script)))
        try:
            runpy.run_path(self.script, run_name="__main__")
        except SystemExit as end:
            return _code(end)
        except MeshwrightError as error:
            print(f"meshwright: process {who}: {error}", file=sys.stderr)
            return error.exit_code
        except Exception as error:
            print(f"meshwright: process {who} ends: {error!r}", file=sys.stderr)
            traceback.print_exc()
            return 1
        return 0

    def ended(self) -> Iterator[tuple[Child, int]]:
        """Those that ended since, and how: exit code, or minus the signal."""
        for child in list(self.alive.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                del self.alive[child.who]
                yield child, os.waitstatus_to_exitcode(status)

    def kill(self, who: int) -> None:
        """End process `who` now, stopped or not."""
        if who in self.alive:
            os.kill(self.alive[who].pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """End all, and wait for that."""
        for child in self.alive.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self.alive.values():
            os.waitpid(child.pid, 0)
        self.alive.clear()

    def free_slot(self) -> int:
        """The lowest place that no process has."""
        taken = {child.slot for child in self.alive.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def exit_words(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"

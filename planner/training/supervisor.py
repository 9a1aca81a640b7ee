"""The supervisor: starts processes, sees which are lost, and publishes who trains from now on.

There is one per machine. The first one owns the store and alone decides; the others start and bury their processes and
tell it so through the store, as they would if they were on its machine. It has no threads and knows nothing of models.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...plans.errors import RequestError
from .epochs import Beat, Epoch, Event, beat_key, event_at, node_key, post, publish, seen
from .processes import Processes, exit_words, start_store
from .stalls import Stalls
from .watch import connect

__all__ = ["Limits", "Node", "Supervisor"]

_POLL_S = 0.01
_LOOK_S = 0.25
# Speeds that differ by less are the same.
_UNLIKE = 0.1
# After the first process has ended well, the others have so long to do so before they count as left behind.
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """hang_s: silence after which a process is ended; stall_s: so long without progress of anyone, and the one behind
    is ended; respawn: how many lost processes are replaced; fruitless: how many losses in a row, without a step between
    them, end the job; least: with fewer processes it ends."""

    hang_s: float = 30.0
    stall_s: float = 600.0
    respawn: int = 0
    fruitless: int = 16
    least: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.hang_s < self.stall_s:
            raise RequestError(
                f"'hang_s' must be positive and less than 'stall_s', got {self.hang_s:g} and {self.stall_s:g}; a "
                "process that gives no sign of life must be found before one that only makes no progress"
            )


class Supervisor:
    """The one that decides. `say` is told, in words, what happens."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        *,
        nproc: int,
        nodes: int,
        listen: str,
        limits: Limits,
        say: Callable[[str], None],
    ) -> None:
        host, _, port = listen.rpartition(":")
        self.nproc, self.nodes, self.limits, self.say = nproc, nodes, limits, say
        self.store_pid, self.port = start_store(host, int(port))
        self.address = f"{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{self.port}"
        self.store = connect(self.address)
        self.store.set("job", str(random.SystemRandom().getrandbits(32)))
        self.local = Processes(script, arguments, self.address, loopback=host.startswith("127."))
        self.node_of: dict[int, int] = {}
        self.node_beats: dict[int, tuple[bytes, float]] = {}
        self.ready: set[int] = set()
        self.finished: set[int] = set()
        self.draining: set[int] = set()
        self.speeds: dict[int, float] = {}
        self.reasons: dict[int, str] = {}
        self.epoch: Epoch | None = None
        self.running: set[int] = set()
        self.told = ""
        self.published = 0.0
        self.events = self.fruitless = self.best = self.code = 0
        self.tail_failed = False
        self.respawns = limits.respawn
        self.grace: float | None = None
        self.looked = 0.0
        self.stalls = Stalls(limits.hang_s, limits.stall_s)

    def run(self) -> int:
        """Supervise until no process is left; the exit code: 0 when the job was done."""
        try:
            for slot in range(self.nproc):
                self._start(slot)
            while self.node_of:
                for child, code in self.local.ended():
                    self._ended(child.who, code)
                    if self._is_loss(child.who, code) and self.respawns > 0 and not self.finished:
                        self.respawns -= 1
                        self._start(child.slot)
                self._read()
                self._look()
                if not self._decide():
                    return 1
                time.sleep(_POLL_S)
            return 0 if self.finished and not self.tail_failed else self.code or 1
        finally:
            self.local.kill_all()
            self._end_store()

    def _end_store(self) -> None:
        os.kill(self.store_pid, signal.SIGKILL)
        os.waitpid(self.store_pid, 0)

    def _start(self, slot: int) -> None:
        who = self.store.add("processes", 1) - 1
        self.node_of[who] = 0
        self.local.start(who, slot)

    # --- what happens

    def _is_loss(self, who: int, code: int) -> bool:
        return not (code == 0 and (who in self.finished or who in self.draining))

    def _ended(self, who: int, code: int) -> None:
        if self.node_of.pop(who, None) is None:
            return
        self.stalls.forget(who)
        self.speeds.pop(who, None)
        if not self._is_loss(who, code):
            self.grace = self.grace or time.monotonic() + _GRACE_S
            return
        self.reasons.setdefault(who, exit_words(code))
        self.say(f"process {who} is lost: {self.reasons[who]}")
        if who in self.finished:
            self.tail_failed = True
        self.code = code if code > 0 else 1

    def _read(self) -> None:
        while (event := event_at(self.store, self.events + 1)) is not None:
            self.events += 1
            self._take(event)

    def _take(self, event: Event) -> None:
        who = event.who
        if event.kind == "ready":
            self.ready.add(who)
        elif event.kind == "done":
            self.finished.add(who)
        elif event.kind == "lost":
            self._ended(who, event.value)
        elif event.kind == "node":
            self.node_beats.setdefault(who, (b"", time.monotonic()))
            self.node_of |= dict.fromkeys(msgspec.json.decode(event.text, type=list[int]), who)
        elif event.kind == "drain" and who in self.node_of:
            self.draining.add(who)
            self.say(f"process {who} is to leave")
        elif event.kind == "add":
            for _ in range(event.value):
                self._start(self.local.free_slot())
        elif event.kind == "slow" and who in self.node_of:
            self._slow(who, msgspec.json.decode(event.text, type=float))
        elif event.kind == "note":
            self.say(f"process {who}: {event.text}")
        elif event.kind == "running" and self.epoch is not None and event.value == self.epoch.number:
            self._runs(event)

    def _slow(self, who: int, speed: float) -> None:
        if speed < 1.0 and abs(self.speeds.get(who, 1.0) - speed) < _UNLIKE:
            return
        self.speeds[who] = speed
        if speed == 1.0:
            del self.speeds[who]
        self.say(f"process {who} works at {speed:.2f} of its speed")

    def _runs(self, event: Event) -> None:
        assert self.epoch is not None
        self.running.add(event.who)
        # One that is idle has nothing to tell.
        self.told = event.text or self.told
        if self.running == set(self.epoch.members):
            told: dict[str, Any] = msgspec.json.decode(self.told)
            done, moved = told.pop("done"), told.pop("moved_bytes", None)
            phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in told.items())
            took = time.monotonic() - self.published
            moves = "" if moved is None else f", {moved:,} bytes moved"
            self.say(f"epoch {self.epoch.number} runs from step {done} after {took:.2f} s ({phases}){moves}")

    def _look(self) -> None:
        """Who is silent, who is stuck, which supervisor is gone."""
        now = time.monotonic()
        if now - self.looked < _LOOK_S:
            return
        self.looked = now
        for who in sorted(self.ready & set(self.node_of) - self.finished):
            beat = seen(self.store, beat_key(who), Beat)
            if beat is not None:
                self.stalls.heard(who, beat, now)
                if beat.done > self.best:
                    self.best, self.fruitless = beat.done, 0
        members = () if self.epoch is None else self.epoch.members
        for who, reason in self.stalls.to_end(set(members) & set(self.node_of) - self.finished, now):
            self.reasons[who] = reason
            self._kill(who)
        for node, (beat, since) in list(self.node_beats.items()):
            key = node_key(node, "beat")
            new = self.store.get(key) if self.store.check([key]) else b""
            if new != beat:
                self.node_beats[node] = (new, now)
            elif now - since > self.limits.hang_s:
                del self.node_beats[node]
                for who in [who for who, where in self.node_of.items() if where == node]:
                    self.reasons[who] = f"its supervisor gave no sign of life for {self.limits.hang_s:g} s"
                    self._ended(who, -9)

    def _kill(self, who: int) -> None:
        if self.node_of.get(who) == 0:
            self.local.kill(who)
        else:
            self.store.set(f"kill/{who}", "1")

    # --- what follows

    def _decide(self) -> bool:
        """Publish what has to be; False when the job cannot go on."""
        alive, now = set(self.node_of), time.monotonic()
        if self.epoch is None:
            if alive and len(self.node_beats) + 1 >= self.nodes and alive <= self.ready:
                self._publish(alive, urgent=False, reason="the start")
            return True
        if self.finished:
            left_behind = alive - self.finished
            if not left_behind or self.grace is None or now < self.grace:
                return True
        lost = {*self.epoch.members, *self.epoch.leaving} - alive
        lost -= {who for who in self.epoch.leaving if who not in self.reasons}
        members = (alive & self.ready) - self.draining - self.finished
        if lost and members:
            reason = "; ".join(f"process {who} {self.reasons.get(who, 'has ended')}" for who in sorted(lost))
            self.fruitless += 1
            if self.fruitless > self.limits.fruitless or len(members) < self.limits.least:
                self.say(
                    f"stopped: {len(members)} processes are left, {self.fruitless} losses in a row without a step; the "
                    "last complete checkpoint is untouched"
                )
                return False
            self._publish(members, urgent=True, reason=reason)
        elif (
            members
            and (members != set(self.epoch.members) or self.speeds != self.epoch.speeds)
            and self.running == set(self.epoch.members)
        ):
            self._publish(members, urgent=False, reason="a change that was asked for")
        return True

    def _publish(self, members: set[int], *, urgent: bool, reason: str) -> None:
        number = 1 if self.epoch is None else self.epoch.number + 1
        leaving = tuple(sorted(self.draining & set(self.node_of) & self.ready))
        self.epoch = Epoch(
            number=number, members=tuple(sorted(members)), leaving=leaving, urgent=urgent, reason=reason,
            speeds=dict(sorted(self.speeds.items())),
        )  # fmt: skip
        publish(self.store, self.epoch)
        self.published, self.running = time.monotonic(), set()
        names = ", ".join(str(who) for who in self.epoch.members)
        self.say(f"epoch {number}: processes {names} train ({reason})")


class Node:
    """A supervisor that joins another one's job with the processes of its machine."""

    def __init__(
        self, script: str, arguments: Sequence[str], *, nproc: int, join: str, say: Callable[[str], None]
    ) -> None:
        self.nproc, self.say = nproc, say
        self.store = connect(join)
        self.number = self.store.add("nodes", 1)
        self.local = Processes(script, arguments, join, loopback=join.startswith("127."))

    def run(self) -> int:
        """Supervise until none of its processes is left; the exit code: 0 when all ended well."""
        beats, told, code = 0, 0.0, 0
        try:
            for slot in range(self.nproc):
                self.local.start(self.store.add("processes", 1) - 1, slot)
            known = msgspec.json.encode(sorted(self.local.alive)).decode()
            post(self.store, Event(kind="node", who=self.number, text=known))
            while self.local.alive:
                for child, how in self.local.ended():
                    code = max(code, how, -how)
                    post(self.store, Event(kind="lost", who=child.who, value=how))
                for who in list(self.local.alive):
                    if self.store.check([f"kill/{who}"]):
                        self.local.kill(who)
                if time.monotonic() - told > _LOOK_S:
                    told, beats = time.monotonic(), beats + 1
                    self.store.set(node_key(self.number, "beat"), str(beats))
                time.sleep(_POLL_S)
            return 1 if code else 0
        except RuntimeError as error:
            self.say(f"the first supervisor is gone: {error}")
            return 1
        finally:
            self.local.kill_all()

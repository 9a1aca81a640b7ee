"""Who has gone silent, and who keeps the others waiting: a process that answers and is late is left alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .epochs import IDLE, Beat

__all__ = ["Stalls"]


@dataclass(slots=True, kw_only=True)
class _Heard:
    beat: Beat
    heard: float
    moved: float


class Stalls:
    """Signs of life, and what they say. Times are in seconds, of one clock."""

    def __init__(self, hang_s: float, stall_s: float) -> None:
        self.hang_s, self.stall_s = hang_s, stall_s
        self._known: dict[int, _Heard] = {}

    def heard(self, who: int, beat: Beat, now: float) -> None:
        """Take in what process `who` last said."""
        known = self._known.get(who)
        if known is None:
            self._known[who] = _Heard(beat=beat, heard=now, moved=now)
            return
        if beat.count != known.beat.count:
            known.heard = now
        if _progress(beat) != _progress(known.beat):
            known.moved = now
        known.beat = beat

    def forget(self, who: int) -> None:
        """`who` has ended."""
        self._known.pop(who, None)

    def to_end(self, members: Collection[int], now: float) -> Iterator[tuple[int, str]]:
        """Which of `members` to end, and why."""
        known = {who: self._known[who] for who in sorted(members) if who in self._known}
        silent = [who for who, heard in known.items() if now - heard.heard > self.hang_s]
        for who in silent:
            self._known[who].heard = now
            yield who, f"gave no sign of life for {self.hang_s:g} s"
        # Those that have nothing to do are waited for by nobody.
        known = {who: heard for who, heard in known.items() if heard.beat.stage != IDLE}
        if silent or not known or any(now - heard.moved <= self.stall_s for heard in known.values()):
            return
        behind = min(known, key=lambda who: _order(known[who].beat))
        others = [who for who in known if _order(known[who].beat) > _order(known[behind].beat)]
        if not others or len(others) + 1 < len(known):
            return
        for heard in known.values():
            heard.moved = now
        last = next((known[who].beat.last for who in others if known[who].beat.last), "a collective")
        waiting = ", ".join(str(who) for who in others)
        yield behind, f"did not enter {last}, for which processes {waiting} waited {self.stall_s:g} s"


def _progress(beat: Beat) -> object:
    return beat.done, beat.stage, beat.issued


def _order(beat: Beat) -> tuple[int, int]:
    """How far a process is: steps, then collectives begun."""
    return beat.done, sum(beat.issued.values())

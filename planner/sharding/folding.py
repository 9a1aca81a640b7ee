"""Folding: equal blocks are one. Nodes of blocks of the same kind share a class, and a class makes one decision.

A block is a numbered child of a list (`layers.3`), a run of them is repeated without another between. Two nodes share
a class when their names agree up to the block's number in the run and their ops, shapes and strategies are equal;
whatever does not fit stays alone.

A deep run is captured by three of its repetitions, the first, the second and the last: the second one stands for all
that were left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...passes.blocks import Run
from ...plans.stamps import Stamp

__all__ = ["CAPTURED", "MIDDLE", "Blocks"]

# Repetitions captured of a deep run: each boundary (outside-first, first-middle, middle-last, last-outside) is there.
CAPTURED = 3
# The one of them that stands for those left out.
MIDDLE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The runs of blocks of a model; of those in `cut` three repetitions were captured, with their own numbers."""

    runs: tuple[Run, ...] = ()
    cut: frozenset[Run] = frozenset()

    def place(self, name: str) -> tuple[Run, int] | None:
        """The run that `name` lies in, and its repetition, from 0 up."""
        for run in self.runs:
            found = run.place(name)
            if found is not None:
                return run, found[0]
        return None

    def captured(self, name: str) -> tuple[Run, int] | None:
        """The run that `name` lies in, and which of its captured repetitions: 0, 1 or 2 where it was cut."""
        place = self.place(name)
        return place and (place[0], min(place[1], CAPTURED - 1) if place[0] in self.cut else place[1])

    def stamp(self, name: str) -> Stamp | None:
        """The kind of block that `name` lies in."""
        return next((found[1] for run in self.runs if (found := run.place(name)) is not None), None)

    def block(self, name: str) -> tuple[Stamp, int] | None:
        """The block that `name` lies in: its kind and its number."""
        stamp = self.stamp(name)
        number = None if stamp is None else stamp.number(name)
        return None if stamp is None or number is None else (stamp, number)

    def pattern(self, name: str) -> str:
        """`name` with what stands for all blocks of its kind in place of the block's number."""
        stamp = self.stamp(name)
        return name if stamp is None else stamp.stamped(name)

    def share(self, name: str) -> int:
        """How many nodes of the model the captured node `name` stands for."""
        place = self.place(name)
        return place[0].count - (CAPTURED - 1) if place and place[0] in self.cut and place[1] == MIDDLE else 1

    def uses(self, source: str, reader: str) -> float:
        """How many uses of a tensor in the model one captured use stands for."""
        a, b = self.place(source), self.place(reader)
        if a and b and a[0] == b[0] and a[1] != b[1] and a[0] in self.cut:
            return (a[0].count - 1) / (CAPTURED - 1)
        return self.share(reader) if b else self.share(source)

    def stands_in(self, name: str) -> bool:
        """Whether `name` lies in a block that stands for left-out ones."""
        return self.share(name) > 1

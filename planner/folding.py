"""Folding: equal blocks are one. Nodes of blocks of the same kind share a class, and a class makes one decision.

A block is a numbered child of a list (`layers.3`). Two nodes share a class when their names agree up to the block's
number and their ops, shapes and strategies are equal; whatever does not fit stays alone.

A deep list is captured by three of its blocks, the first, a middle one and the last: the middle one stands for all that
were left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CAPTURED", "Blocks"]

# Blocks captured of a deep list: each boundary (outside-first, first-middle, middle-last, last-outside) occurs once.
CAPTURED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Lists of blocks of one kind: `counts` maps the path of a list to how many blocks the model has; lists in `cut`
    were captured by CAPTURED of them, with the numbers 0, 1 and 2."""

    counts: Mapping[str, int] = field(default_factory=dict)
    cut: frozenset[str] = frozenset()

    def split(self, name: str) -> tuple[str, int] | None:
        """List and number of the outermost block that `name` lies in."""
        for path in sorted(self.counts, key=len):
            lead = f"{path}." if path else ""
            if name.startswith(lead) and (match := re.match(r"\d+(?=[.:]|$)", name[len(lead) :])):
                return path, int(match.group())
        return None

    def pattern(self, name: str) -> str:
        """`name` with `*` for the number of its block."""
        return self._numbered(name, "*")

    def renumbered(self, name: str) -> str:
        """The name in the whole model of what the capture calls `name`: the last captured block is the last one."""
        place = self.split(name)
        if place is None or place[0] not in self.cut or place[1] != CAPTURED - 1:
            return name
        return self._numbered(name, str(self.counts[place[0]] - 1))

    def share(self, name: str) -> int:
        """How many nodes of the model the captured node `name` stands for."""
        place = self.split(name)
        return self.counts[place[0]] - (CAPTURED - 1) if place and place[0] in self.cut and place[1] == 1 else 1

    def uses(self, source: str, reader: str) -> float:
        """How many uses of a tensor in the model one captured use stands for."""
        a, b = self.split(source), self.split(reader)
        if a and b and a[0] == b[0] and a[1] != b[1] and a[0] in self.cut:
            return (self.counts[a[0]] - 1) / (CAPTURED - 1)
        return self.share(reader) if b else self.share(source)

    def stands_in(self, name: str) -> bool:
        """Whether `name` lies in a block that stands for left-out ones."""
        return self.share(name) > 1

    def _numbered(self, name: str, number: str) -> str:
        place = self.split(name)
        if place is None:
            return name
        lead = f"{place[0]}." if place[0] else ""
        return f"{lead}{number}{name[len(lead) + len(str(place[1])) :]}"

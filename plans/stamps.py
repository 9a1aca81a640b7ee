"""Stamps: names that stand for equal blocks of a list, as `layers.*.wq.weight` for `layers.0.wq.weight` and all others.

layers.*          every block of the list
layers.3-60       those numbered 3 to 60
layers.5-59/6     every sixth from 5 to 59
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["Stamp", "numbers_of", "paired", "stamped_block"]

# Digits are few, so that a pattern that someone wrote cannot make a number too long to read.
_RANGE = re.compile(r"(0|[1-9]\d{0,6})-([1-9]\d{0,6})(?:/([1-9]\d{0,6}))?", re.ASCII)
_NUMBER = re.compile(r"(\d{1,7})(?=[.:]|$)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The blocks `numbers` of the list at module path `path`; `mark` stands for their number in names."""

    path: str
    numbers: range
    mark: str

    @classmethod
    def of(cls, path: str, numbers: range, *, whole: bool) -> Stamp:
        """The stamp of some blocks of a list, or of its `whole`."""
        step = f"/{numbers.step}" if numbers.step > 1 else ""
        return cls(path=path, numbers=numbers, mark="*" if whole else f"{numbers[0]}-{numbers[-1]}{step}")

    @classmethod
    def parse(cls, pattern: str, count: int) -> Stamp | None:
        """The stamp that a plan calls `pattern` and says to stand for `count` blocks; None where it is none."""
        path, _, mark = pattern.rpartition(".")
        numbers = range(count) if mark == "*" else numbers_of(mark)
        return None if numbers is None or len(numbers) != count else cls(path=path, numbers=numbers, mark=mark)

    @property
    def pattern(self) -> str:
        """The path of these blocks in names that stand for all of them."""
        return f"{self._lead}{self.mark}"

    @property
    def _lead(self) -> str:
        return f"{self.path}." if self.path else ""

    def number(self, name: str) -> int | None:
        """The number of the block that `name` lies in, when it is one of these."""
        lead = self._lead
        match = _NUMBER.match(name, len(lead)) if name.startswith(lead) else None
        return int(match.group()) if match and int(match.group()) in self.numbers else None

    def stamped(self, name: str) -> str:
        """`name`, which lies in one of these blocks, with the mark for the block's number."""
        return self.put(name, self.mark)

    def names(self, stamped: str) -> list[str]:
        """What `stamped`, a name with the mark, is called in each of these blocks."""
        rest = stamped[len(self.pattern) :]
        return [f"{self._lead}{number}{rest}" for number in self.numbers]

    def put(self, name: str, number: int | str) -> str:
        """`name`, which lies in one of these blocks, with another number."""
        match = _NUMBER.match(name, len(self._lead))
        assert match is not None
        return f"{self._lead}{number}{name[match.end() :]}"


def numbers_of(mark: str) -> range | None:
    """The numbers that '3-60' or '5-59/6' says; None where it is no such range of two or more."""
    match = _RANGE.fullmatch(mark)
    if match is None:
        return None
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    # One way to write each: a step of one is not said, and the last number is one of them.
    right = first < last and (last - first) % step == 0 and match[3] != "1"
    return range(first, last + 1, step) if right else None


def paired(ours: Iterable[Stamp], theirs: Iterable[Stamp]) -> dict[Stamp, Stamp]:
    """For each of `ours` the one of `theirs` that is the same kind of block of the same list, which may be of another
    length: lists pair where they have as many kinds, in turn with the same steps."""
    left, right = (sorted(some, key=lambda s: (s.path, s.numbers.start)) for some in (ours, theirs))
    found: dict[Stamp, Stamp] = {}
    for path in {stamp.path for stamp in left}:
        here, there = ([s for s in some if s.path == path] for some in (left, right))
        if [s.numbers.step for s in here] == [s.numbers.step for s in there]:
            found |= zip(here, there, strict=True)
    return found


def stamped_block(name: str, patterns: Collection[str]) -> str | None:
    """The one of `patterns` that is `name`'s leading module path, or None."""
    path = name.split("::", 1)[0]
    cut = path.find(".")
    while cut >= 0:
        if path[:cut] in patterns:
            return path[:cut]
        cut = path.find(".", cut + 1)
    return path if path in patterns else None

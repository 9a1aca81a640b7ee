"""A plan carried over to a model that has changed, as a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from .plan import Plan

__all__ = ["Adapted"]

_SHOWN = 5


class Adapted(Struct, frozen=True, kw_only=True):
    """A plan for the changed model, and what it shares with the one that it was made from.

    carried    how many names keep what the first plan says of them
    new        names of the model that the first plan does not know; they were solved for
    gone       names of the first plan that the model does not have
    changed    names whose layout or op in the first plan is none here, with the reason; they were solved for
    lengths    lists of equal blocks that are longer or shorter now
    recut      whether the stages of a pipeline begin elsewhere, because the model has other blocks
    """

    plan: Plan
    carried: int
    new: tuple[str, ...]
    gone: tuple[str, ...]
    changed: tuple[str, ...]
    lengths: tuple[str, ...]
    recut: bool = False

    @property
    def same(self) -> bool:
        """Whether the model is the one that the plan was made for, as far as names and choices tell."""
        return not (self.new or self.gone or self.changed or self.lengths)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def differences(self) -> str:
        """What is new, gone or changed in the model, where nothing was carried over."""
        return "\n".join([f"{self.carried} names are as in the plan", *[*self._lines()][1:]])

    def _lines(self) -> Iterator[str]:
        yield f"{self.carried} names carried over"
        for length in self.lengths:
            yield f"blocks {length}"
        if self.recut:
            yield "stages and schedule of the pipeline made anew"
        for what, names in (("new", self.new), ("gone", self.gone), ("changed", self.changed)):
            if names:
                yield f"{what}: {_some(names)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"

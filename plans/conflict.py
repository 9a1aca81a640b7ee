"""Why a request has no plan, as a value."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from .words import bytes_words

__all__ = ["Conflict"]


class Conflict(Struct, frozen=True, kw_only=True):
    """Limits of a request that cannot be met together, and the nearest changes that can.

    limits                 the conflicting ones; none of them can be spared when `minimal`, which is False where time
                           ran out. Empty when no conflict was proven: then `minimal` says that a plan fits
    drop                   each of these is enough to drop alone, all else kept
    least_memory_bytes     a memory limit per device with which a plan was found, all constraints kept
    proven_memory_bytes    no plan needs less than this, as estimated (docs/how-it-chooses.md)
    """

    limits: tuple[str, ...]
    minimal: bool
    drop: tuple[str, ...]
    least_memory_bytes: int | None
    proven_memory_bytes: int | None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.limits:
            fits = "No limits conflict: there is a plan that meets them all."
            yield fits if self.minimal else "Which limits conflict could not be told in the time given."
            return
        yield "These limits conflict" + (", and none of them can be spared:" if self.minimal else "; time ran out:")
        yield from (f"  {limit}" for limit in self.limits)
        yield "The nearest changes that fit:"
        if self.least_memory_bytes is not None:
            known = self.proven_memory_bytes or 0
            yield (
                f"  a memory limit of {self.least_memory_bytes} bytes ({bytes_words(self.least_memory_bytes)}); "
                f"under {bytes_words(known)} is proven not to fit by the estimate"
            )
        yield from (f"  without the {limit}" for limit in self.drop)
        if self.least_memory_bytes is None and not self.drop:
            yield "  none was found by changing one of them"

"""Which samples each training step uses: a pure function of the step's number, so that nothing is lost or used twice
when the number of processes changes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .errors import RequestError

__all__ = ["Batches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """`epochs` passes over so many `samples`, in batches of `size`; the last batch of a pass may be smaller.

    Batch i is `batches[i]`, a tuple of sample numbers. Each pass has its own order by `seed`; None keeps 0, 1, 2, ...
    """

    samples: int
    size: int
    epochs: int = 1
    seed: int | None = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.size < 1 or self.epochs < 0:
            raise RequestError(
                "'samples' and 'size' must be at least 1 and 'epochs' at least 0, got "
                f"{self.samples}, {self.size}, {self.epochs}"
            )

    @property
    def per_epoch(self) -> int:
        """Batches of one pass."""
        return -(-self.samples // self.size)

    def __len__(self) -> int:
        return self.per_epoch * self.epochs

    def __getitem__(self, number: int) -> tuple[int, ...]:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        epoch, at = divmod(number, self.per_epoch)
        return self.samples_of(epoch)[at * self.size : (at + 1) * self.size]

    def samples_of(self, epoch: int) -> tuple[int, ...]:
        """All samples in the order of pass `epoch`."""
        order = list(range(self.samples))
        if self.seed is not None:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return tuple(order)

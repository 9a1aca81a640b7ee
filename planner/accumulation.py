"""A step in several micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Accumulation", "Reduce"]

Reduce = Literal["step", "microbatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """In how many micro-batches a step is run, and whether gradients are reduced once in a step or in each."""

    microbatches: int = 1
    reduce: Reduce = "step"

    @property
    def share(self) -> float:
        """Reductions of a gradient per micro-batch."""
        return 1.0 if self.reduce == "microbatch" else 1.0 / self.microbatches

    @property
    def unreduced(self) -> bool:
        """Whether what is added up over micro-batches is not yet reduced."""
        return self.microbatches > 1 and self.reduce == "step"

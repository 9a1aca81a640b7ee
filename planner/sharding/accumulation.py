"""A step in several micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Accumulation", "Reduce"]

Reduce = Literal["step", "microbatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """In how many micro-batches a step is run, and whether gradients are reduced once in a step or in each; `late` when
    they stay whole until the backward is done even where there is one micro-batch."""

    microbatches: int = 1
    reduce: Reduce = "step"
    late: bool = False

    @property
    def share(self) -> float:
        """Reductions of a gradient per micro-batch."""
        return 1.0 if self.reduce == "microbatch" else 1.0 / self.microbatches

    @property
    def once(self) -> bool:
        """Whether what depends on parameters alone is done once for several micro-batches."""
        return self.microbatches > 1

    @property
    def hides(self) -> bool:
        """Whether the reduction of a gradient can run beside the backward."""
        return not (self.late and self.microbatches == 1)

    @property
    def unreduced(self) -> bool:
        """Whether what is added up over micro-batches is not yet reduced."""
        return self.late or (self.microbatches > 1 and self.reduce == "step")

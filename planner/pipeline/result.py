"""What the tuner finds: a partition, a placement and a schedule, what they cost, and how far from the best they
can be.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...cost_models.pipeline import Simulation, StageCosts
from ...plans import Schedule

__all__ = ["Tuned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """One solution. `lower_bound`: no solution of the same request has a smaller step time; `limits`: memory per rank.

    progress: (CPU seconds, step time) each time that a better one was found.
    """

    schedule: Schedule
    costs: StageCosts
    simulation: Simulation
    lower_bound: float
    limits: tuple[float, ...] | None
    cuts: tuple[int, ...] | None
    progress: tuple[tuple[float, float], ...]
    search_cpu_s: float

    @property
    def gap(self) -> float:
        """By which share of the bound the step time lies above it."""
        return self.simulation.step_time / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its memory."""
        peaks = self.simulation.peak_memory
        return self.limits is None or all(peak <= limit + 1e-9 for peak, limit in zip(peaks, self.limits, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks until the makespan, as a share of all time."""
        whole = self.simulation.makespan * self.schedule.ranks
        return sum(bubble.total for bubble in self.simulation.bubbles) / whole if whole else 0.0

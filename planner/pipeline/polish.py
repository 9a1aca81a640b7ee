"""Better orders and cuts for a plan: annealing runs of so many seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .orders import Clock, Orders, improve

__all__ = ["Polisher"]

_CUT_SHARE, _MEAN_WEIGHT = 0.1, 0.3
# Actions evaluated per second, until a run has told, and the fewest moves of a run.
_RATE, _FEWEST = 3e7, 200


@dataclass(slots=True, kw_only=True)
class Polisher:
    """Runs from any plan of one problem.

    prefix: sums of F, I, W and memory before each unit, 4 x (units + 1). target: a step time that nothing is below.
    """

    prefix: np.ndarray
    overhead: float
    target: float
    clock: Clock
    rate: float = _RATE

    def better(self, plan: Orders, seconds: float, *, heat: float, seed: int) -> Orders:
        """The best of a run of about so many seconds from `plan`; heat: temperature as a share of the step time."""
        begin, size = self.clock.spent_s, len(plan.word)
        moves = int(seconds * self.rate / size)
        if moves < _FEWEST or plan.step <= self.target:
            return plan
        found = improve(
            plan,
            moves,
            hot=heat,
            cold=heat * 0.02,
            seed=seed,
            target=self.target,
            prefix=self.prefix,
            overhead=self.overhead,
            cut_share=_CUT_SHARE,
            mean_weight=_MEAN_WEIGHT,
        )
        spent = self.clock.spent_s - begin
        # A run that ends at once, at the target, says nothing; nor does one that compiles.
        if found.step > self.target and 0.2 * seconds < spent < 3.0 * seconds:
            self.rate = moves * size / spent
        return found if found.value < plan.value else plan

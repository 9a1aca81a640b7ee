"""Whether figures that should hover around 0 have begun to lie above it: cumulative sums, one per figure.

A sum grows by what a figure exceeds its slack and shrinks otherwise (Page, 1954). Slack and threshold are multiples of
the figures' own spread, as seen on healthy steps; one step adds at most a part of the threshold, so that a single
hiccup, however large, is no alarm.
"""

from __future__ import annotations

from collections import deque

import numpy as np

__all__ = ["Change", "Spread"]

_SHARE = 0.6
_KEPT, _PRIOR_COUNT = 200, 8
_FLOOR = 0.002


class Spread:
    """A robust standard deviation of the last healthy figures, begun with a guess that counts as a few of them."""

    def __init__(self, guess: float, floor: float) -> None:
        self.guess, self.floor = guess, floor
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self.value = max(guess, floor)

    def add(self, figures: np.ndarray) -> None:
        """Take in the healthy figures of one step, as the standard deviation around 0 of that step."""
        if not figures.size:
            return
        # The median of |x| is 0.6745 standard deviations of a normal distribution.
        self._seen.append(float(np.median(np.abs(figures)) / 0.6745))
        count = len(self._seen)
        # Medians of few figures vary: their root mean square over steps settles.
        seen = float(np.sqrt(np.mean(np.square(self._seen))))
        self.value = max((self.guess * _PRIOR_COUNT + seen * count) / (_PRIOR_COUNT + count), self.floor)


class Change:
    """Sums of figures of one shape; `least` is the smallest excess that is of interest whatever the spread.

    slack, threshold: in spreads. guess: the spread before any figure was seen.
    """

    def __init__(
        self, shape: tuple[int, ...], *, guess: float, least: float, slack: float = 2.0, threshold: float = 8.0
    ) -> None:
        self.spread = Spread(guess, _FLOOR)
        self.least, self.slack, self.threshold = least, slack, threshold
        self.sums = np.zeros(shape)
        self.since = np.full(shape, -1)
        self.total = np.zeros(shape)
        self.alarmed = np.zeros(shape, bool)

    @property
    def suspicious(self) -> np.ndarray:
        """Figures that must not be learnt from: above their slack for now, or known to have changed."""
        return (self.sums > 0) | self.alarmed

    def add(self, step: int, figures: np.ndarray, doubt: float = 0.0) -> np.ndarray:
        """Take in one step; which figures now are, and before were not, changed.

        doubt: by how much figures may be off for want of knowledge; such figures say nothing of the spread.
        """
        slack = max(self.slack * self.spread.value, self.least) + doubt
        threshold = max(self.threshold * self.spread.value, self.least)
        grown = np.maximum(0.0, self.sums + np.minimum(figures - slack, _SHARE * threshold))
        fresh = (self.sums == 0) & (grown > 0)
        self.since[fresh] = step
        self.total[fresh] = 0.0
        self.total = np.where(grown > 0, self.total + figures, 0.0)
        # After recovery a sum that had grown for long must not take as long to shrink.
        self.sums = np.minimum(grown, 2 * threshold)
        over = self.sums > threshold
        new = over & ~self.alarmed
        self.alarmed = (self.alarmed | over) & (self.sums > 0)
        if not doubt:
            self.spread.add(figures[~self.suspicious])
        return new

    def excess(self, step: int) -> np.ndarray:
        """The mean of each figure since its sum began to grow."""
        return self.total / np.maximum(1, step - self.since + 1)

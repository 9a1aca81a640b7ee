"""Whether training is as fast as it should be, and which process is slow if not.

One rank holds the seconds of every step against what its workload should take (planner/detector). The ranks of a step
wait for each other, so its seconds name nobody: after an alarm each rank times the same piece of work by itself, and
those that stand out twice running are slow. The same is done when an epoch begins, and now and then without an alarm:
where steps vary by themselves, because other work shares the cores, a slow rank may not show in them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from ...cost_models.pipeline import CriticalPath
from ...plans.plan import DynamicDim
from ..detector import Detector
from ..zoo import one_f_one_b

__all__ = ["Curve", "Pace", "own_work_s", "slow_ones"]

# Checks of ranks after an alarm; a rank that is slow in two in a row is told of.
_CHECKS, _TWICE = 3, 2
# While a step takes too long and no rank was found, they are checked again after so many steps.
_AGAIN = 10
# Without an alarm they are checked once in so many times what that takes.
_RARELY = 1000
# Steps that capture and connect; and the most that one counts against the median of recent ones.
_WARM, _HICCUP, _RECENT = 3, 3.0, 50
_SIDE, _TIMES = 192, 360
_CUDA_SIDE, _CUDA_TIMES = 4096, 20
# Of so many pieces of work the quickest counts: other work on the same cores slows some of them, a slow device all.
_PIECES = 3


class Curve(Struct, frozen=True, kw_only=True):
    """Predicted seconds of a step at some sizes of the one symbol that its inputs have (`mw.workload_of`)."""

    symbol: str
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, dims: Sequence[DynamicDim], shapes: Mapping[str, tuple[int, ...]]) -> float | None:
        """Seconds for inputs of these shapes, by name; None where the symbol's size is not among them."""
        for dim in dims:
            if dim.symbol == self.symbol and dim.input in shapes:
                return float(np.interp(shapes[dim.input][dim.dim], self.sizes, self.seconds))
        return None


class Pace:
    """The pace of one epoch, as one of its ranks watches it; `predicted_s` are the seconds of a planned step. A rank
    is slow below the share `slow` of the median's speed; where that is 0 nothing is looked at."""

    def __init__(self, predicted_s: float, slow: float) -> None:
        self.predicted_s, self.slow = max(predicted_s, 1e-9), slow
        self.detector = Detector(CriticalPath.of(one_f_one_b(1, 1)), 1)
        # When an epoch begins nothing is known of its ranks.
        self.checks, self.suspects = _CHECKS if slow else 0, dict[int, int]()
        self.steps = 0
        # Seconds of steps since ranks were last checked, and of those to the next check.
        self.since_s, self.every_s = 0.0, float("inf")
        self.recent: deque[float] = deque(maxlen=_RECENT)

    def took(self, seconds: float, predicted_s: float | None = None) -> None:
        """Take in a step, and what it should take where that is known for its workload."""
        self.steps += 1
        self.since_s += seconds
        if self.slow and self.since_s > self.every_s:
            self.since_s, self.checks = 0.0, max(self.checks, _TWICE)
        if self.steps <= _WARM or not self.slow:
            return
        # One hiccup, a capture for instance, must not widen what counts as usual.
        usual = float(np.median(self.recent)) if self.recent else seconds
        self.recent.append(seconds)
        seconds = min(seconds, _HICCUP * usual)
        work = np.array([[[predicted_s or self.predicted_s, 0.0]]])
        halves = np.full((1, 2, 1, 1), seconds / 2)
        fresh = self.detector.observe(self.steps, seconds, work=work, actions_s=halves).alarms
        lasting = self.detector.ranks.alarmed.any() or self.detector.steps.alarmed.any()
        if fresh or (lasting and self.steps % _AGAIN == 0):
            self.checks = _CHECKS

    def checked(self, seconds: Sequence[float]) -> dict[int, float]:
        """Take in what each rank took for the same work; the speeds of those that are slow, once that is certain."""
        self.checks -= 1
        self.since_s, self.every_s = 0.0, _RARELY * _TWICE * _PIECES * max(seconds)
        found = slow_ones(seconds, self.slow)
        self.suspects = {rank: self.suspects.get(rank, 0) + 1 for rank in found}
        sure = {rank: found[rank] for rank, times in self.suspects.items() if times >= _TWICE}
        if sure:
            self.checks = 0
        return sure


def slow_ones(seconds: Sequence[float], slow: float) -> dict[int, float]:
    """Ranks that work below the share `slow` of the median's speed, and that share."""
    middle = sorted(seconds)[(len(seconds) - 1) // 2]
    return {rank: round(middle / one, 2) for rank, one in enumerate(seconds) if middle / one < slow}


def own_work_s(device: torch.device) -> float:
    """Seconds of a piece of work that waits for nobody, the quickest of several."""
    cuda = device.type == "cuda"
    side, times = (_CUDA_SIDE, _CUDA_TIMES) if cuda else (_SIDE, _TIMES)
    left: Any = torch.ones(side, side, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    out = left @ left
    if cuda:
        torch.cuda.synchronize()
    spent = []
    for _ in range(_PIECES):
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(left, left, out=out)
        if cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return min(spent)

"""What a move can hide behind: the compute that it is started ahead of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...passes.keeping import is_keep
from ...plans.marks import KEPT

if TYPE_CHECKING:
    from .decisions import Decision, Reading

__all__ = ["behind_what", "keeps"]


def behind_what(
    source: Decision, target: Decision, behind: Decision, reading: Reading, *, gradient: bool, once: bool
) -> np.ndarray:
    """Compute seconds that a move from `source` to `target` can hide behind, per choice of the two: a gradient's behind
    the op that made it, a parameter's behind its reader (of several, through a hub, the least of the first).

    One gather of a parameter, kept for the backward, hides behind the least of its first reader, which then has nothing
    left to hide another. Of a step of several micro-batches (`once`) it comes before them all, behind nothing.
    """
    if gradient:
        return source.seconds[:, None] if source.kind == "op" else np.zeros((1, 1))
    if keeps(target):
        return np.where(_kept(target) & (not once), behind.seconds.min(), 0.0)[None, :]
    if target.kind != "op":
        return np.full((1, 1), behind.seconds.min())
    if keeps(source) and not reading.backward and not once:
        return np.where(_kept(source), 0.0, 1.0)[:, None] * target.seconds[None, :]
    return target.seconds[None, :]


def keeps(decision: Decision) -> bool:
    """Whether a decision is on whether a parameter is kept gathered."""
    return decision.kind == "op" and decision.node is not None and is_keep(decision.node)


def _kept(decision: Decision) -> np.ndarray:
    return np.array([strategy.local == KEPT for strategy in decision.strategies])

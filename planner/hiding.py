"""What a move can hide behind: the compute that it is started ahead of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .formulate import Decision

__all__ = ["behind_what"]


def behind_what(source: Decision, target: Decision, reader: Decision, *, gradient: bool) -> np.ndarray:
    """Compute seconds that a move from `source` to `target` can hide behind, per choice of the two: a gradient's behind
    the op that made it, a parameter's behind its reader (of several, through a hub, the least of the first)."""
    if gradient:
        return source.seconds[:, None] if source.kind == "op" else np.zeros((1, 1))
    if target.kind == "op":
        return target.seconds[None, :]
    return np.full((1, 1), reader.seconds.min())

"""Lower bounds on the step time of a layer profile under every partition, placement and schedule."""

from __future__ import annotations

from collections.abc import Sequence

from .profiles import LayerProfile

__all__ = ["profile_bound"]


def profile_bound(
    profile: LayerProfile,
    ranks: int,
    microbatches: int,
    *,
    limits: Sequence[float] | None = None,
    overhead: float = 0.0,
    seconds: float = 1.0,
) -> float:
    """A time that no plan undercuts."""
    total = sum(map(sum, profile.costs)) * microbatches
    start = 0.0
    at = 0.0
    for k in range(ranks):
        start += at
        at += profile.costs[min(k, profile.units - 1)][0] + profile.delay
    return (total + start) / ranks

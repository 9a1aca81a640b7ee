"""The stages of a plan's pipeline as the simulator takes them."""

from __future__ import annotations

from collections.abc import Sequence

from ...plans.pipelines import StageCost
from .costs import StageCosts

__all__ = ["planned_costs"]


def planned_costs(costs: Sequence[StageCost]) -> StageCosts:
    """Seconds, and bytes of saved activations, which are kept from F until W (or B)."""
    saved = tuple(float(cost.saved_bytes) for cost in costs)
    return StageCosts(
        forward=tuple(cost.forward_s for cost in costs),
        input_gradient=tuple(cost.input_gradient_s for cost in costs),
        weight_gradient=tuple(cost.weight_gradient_s for cost in costs),
        memory_forward=saved,
        memory_input_gradient=(0.0,) * len(costs),
        memory_weight_gradient=tuple(-amount for amount in saved),
        finish=tuple(cost.step_s for cost in costs),
        # Each boundary has its own time: seconds over a line of one second per second.
        boundary_bytes=tuple(cost.send_s for cost in costs[:-1]),
        bandwidth=1.0,
    ).complete()

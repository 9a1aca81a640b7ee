"""The pipeline of a plan as the simulator takes it."""

from __future__ import annotations

from collections.abc import Sequence

from ...plans import RequestError
from ...plans.pipelines import Pipeline, StageCost
from .costs import StageCosts
from .simulate import Simulation, simulate

__all__ = ["planned_costs", "simulate_planned"]


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


def simulate_planned(pipeline: Pipeline) -> Simulation:
    """The pipeline's own schedule at its own costs, in seconds and bytes; RequestError where nobody priced it."""
    costs = [stage.cost for stage in pipeline.stages]
    if any(cost is None for cost in costs):
        raise RequestError("'pipeline' must have the costs of its stages to be simulated, got none; plan it again")
    return simulate(pipeline.order, planned_costs([cost for cost in costs if cost is not None]))

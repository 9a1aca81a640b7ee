"""What `meshwright simulate` asks for: a profile or fixed stages, a named schedule or a search."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost_models.pipeline import StageCosts, planned_costs, simulate
from ...plans import Pipeline, RequestError
from ..zoo import chunks_of, named_schedule
from .bounds import fixed_stages_bound
from .fixed import tune_orders
from .joint import tune_profile
from .orders import Clock
from .profiles import LayerProfile, StageRow, equal_cuts
from .result import Tuned

__all__ = ["simulate_plan", "simulate_profile", "simulate_stages"]


def simulate_plan(
    pipeline: Pipeline, schedule: str | None, *, memory_limit: float | None, clock: Clock, seed: int = 0
) -> Tuned:
    """The stages of a plan by its own schedule (None), by 'auto' in their places, or by a published schedule.

    Seconds, and bytes of saved activations. RequestError where the plan was not priced.
    """
    priced = [stage.cost for stage in pipeline.stages]
    costs = planned_costs([cost for cost in priced if cost is not None])
    if costs.stages != len(priced):
        raise RequestError("'plan' must have the costs of its stages to be simulated, got none; plan it again")
    own, ranks, count = pipeline.order, pipeline.ranks, pipeline.microbatches
    limits = None if memory_limit is None else (memory_limit,) * ranks
    if schedule == "auto":
        return tune_orders(costs, own.placement, ranks, count, limits=limits, clock=clock, seed=seed)
    if schedule is not None:
        if costs.stages != ranks * chunks_of(schedule):
            raise RequestError(
                f"'--schedule' must have as many stages as the plan, {costs.stages} on {ranks} ranks, got {schedule} "
                f"with {ranks * chunks_of(schedule)}"
            )
        return _published(schedule, costs, ranks, count, limits, None, clock)
    return Tuned(
        schedule=own,
        costs=costs,
        simulation=simulate(own, costs),
        lower_bound=fixed_stages_bound(costs, own.placement, count, limits),
        limits=limits,
        cuts=None,
        progress=(),
        search_cpu_s=clock.spent_s,
    )


def simulate_stages(row: StageRow, schedule: str, *, memory_limit: float | None, clock: Clock, seed: int = 0) -> Tuned:
    """`schedule` ('auto' or a published one) for the stages of `row`, stage by stage on the ranks of that schedule.

    Without a published one the stages lie on the ranks in order and, where there are more of them, over and over.
    """
    limits = None if memory_limit is None else (memory_limit,) * row.ranks
    if schedule == "auto":
        placement = tuple(stage % row.ranks for stage in range(row.costs.stages))
        return tune_orders(row.costs, placement, row.ranks, row.microbatches, limits=limits, clock=clock, seed=seed)
    chunks = chunks_of(schedule)
    if row.costs.stages != row.ranks * chunks:
        raise RequestError(
            f"'--stage-costs' must have {row.ranks * chunks} stages for {schedule} on {row.ranks}"
            f" ranks, got {row.costs.stages}"
        )
    return _published(schedule, row.costs, row.ranks, row.microbatches, limits, None, clock)


def simulate_profile(
    profile: LayerProfile,
    schedule: str,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: float | None,
    overhead: float = 0.0,
    layers: Sequence[int] | None = None,
    placement: Sequence[int] | None = None,
    clock: Clock,
    seed: int = 0,
) -> Tuned:
    """`schedule` for a layer profile: published ones on equal layers, 'auto' searches partition, placement and order.

    layers (per stage) and placement (rank per stage) fix what they give.
    """
    limits = None if memory_limit is None else (memory_limit,) * ranks
    if schedule == "auto" and layers is None:
        if placement is not None:
            raise RequestError("'--placement' must be given with '--partition', got it alone; give both or neither")
        return tune_profile(profile, ranks, microbatches, limits=limits, overhead=overhead, clock=clock, seed=seed)
    stages = len(layers) if layers is not None else ranks * chunks_of(schedule)
    cuts = equal_cuts(profile, stages) if layers is None else profile.cuts_of(layers)
    costs = profile.stage_costs(cuts, overhead=overhead)
    if schedule != "auto":
        if placement is not None:
            raise RequestError(f"'--placement' must be left to the schedule {schedule}, got one; use --schedule auto")
        if stages != ranks * chunks_of(schedule):
            raise RequestError(
                f"'--partition' must have {ranks * chunks_of(schedule)} stages for {schedule}, got {stages}"
            )
        return _published(schedule, costs, ranks, microbatches, limits, cuts, clock)
    place = tuple(stage % ranks for stage in range(stages)) if placement is None else tuple(placement)
    if len(place) != stages or set(place) != set(range(ranks)):
        raise RequestError(
            f"'--placement' must name a rank below {ranks} for each of {stages} stages and leave none"
            f" out, got {list(place)}"
        )
    found = tune_orders(costs, place, ranks, microbatches, limits=limits, clock=clock, seed=seed)
    return _with_cuts(found, cuts)


def _published(
    name: str,
    costs: StageCosts,
    ranks: int,
    microbatches: int,
    limits: Sequence[float] | None,
    cuts: tuple[int, ...] | None,
    clock: Clock,
) -> Tuned:
    parts = (costs.forward, costs.input_gradient, costs.weight_gradient)
    forward, inputs, weights = (sum(part) / costs.stages for part in parts)
    schedule = named_schedule(name, ranks, microbatches, costs=(forward, inputs, weights), delay=costs.delay)
    return Tuned(
        schedule=schedule,
        costs=costs,
        simulation=simulate(schedule, costs),
        lower_bound=fixed_stages_bound(costs, schedule.placement, microbatches, None),
        limits=None if limits is None else tuple(limits),
        cuts=cuts,
        progress=(),
        search_cpu_s=clock.spent_s,
    )


def _with_cuts(found: Tuned, cuts: tuple[int, ...]) -> Tuned:
    return Tuned(
        schedule=found.schedule,
        costs=found.costs,
        simulation=found.simulation,
        lower_bound=found.lower_bound,
        limits=found.limits,
        cuts=cuts,
        progress=found.progress,
        search_cpu_s=found.search_cpu_s,
    )

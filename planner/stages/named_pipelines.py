"""Pipelines by name: a model cut at equal blocks, and a published schedule to run it."""

from __future__ import annotations

from collections.abc import Sequence

from ...passes.graph import Captured
from ...passes.naming import block_name
from ...passes.places import forward_ops
from ...plans.errors import RequestError
from ...plans.pipelines import Pipeline
from ..zoo import chunks_of, named_schedule

__all__ = ["equal_firsts", "named_pipeline"]


def named_pipeline(captured: Captured, ranks: int, microbatches: int, schedule: str) -> Pipeline:
    """`captured` cut into as many stages as the schedule called `schedule` has on `ranks` pipeline ranks, of equally
    many blocks. RequestError where the model has fewer."""
    if ranks < 1 or microbatches < 1:
        raise RequestError(
            f"'pipeline' and 'microbatches' must be at least 1, got {ranks} pipeline ranks and {microbatches} "
            "micro-batches"
        )
    return Pipeline.of(
        equal_firsts(captured, ranks * chunks_of(schedule)), named_schedule(schedule, ranks, microbatches)
    )


def equal_firsts(captured: Captured, stages: int) -> tuple[str, ...]:
    """Where `stages` stages of equally many blocks begin (see `plans.Stage.first`); of a model with fewer blocks, of
    equally many ops."""
    names = [captured.names[node] for node in forward_ops(captured)]
    blocks = [name for name in dict.fromkeys(block_name(name) for name in names) if name is not None]
    cuts = _even(blocks, stages) if len(blocks) >= stages else _even(names, stages)
    if len(set(cuts)) < stages:
        raise RequestError(
            f"'pipeline' must leave an op for each stage, got {stages} stages for {len(names)} ops in {len(blocks)} "
            "blocks; use fewer ranks or another schedule"
        )
    return ("", *cuts[1:])


def _even(places: Sequence[str], stages: int) -> list[str]:
    return [places[index * len(places) // stages] for index in range(stages)]

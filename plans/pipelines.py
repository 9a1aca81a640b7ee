"""A pipeline as a plan writes it down: where the model is cut, which ranks hold the stages, and in which order they
work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .actions import parse_action
from .errors import RequestError
from .progress import progress
from .schedules import Schedule

__all__ = ["Pipeline", "Stage", "StageCost"]

Seconds = Annotated[float, Meta(ge=0.0, le=1e15)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Place = Annotated[int, Meta(ge=0, lt=2**16)]


class StageCost(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage is predicted to cost on one device: seconds of forward, input and weight gradient, and of handing on
    its result to another rank, each of one micro-batch; seconds of reducing gradients and updating, once in a step;
    bytes that a micro-batch leaves from its forward to its backward, bytes held throughout, and the most bytes beside
    these within one action."""

    forward_s: Seconds
    input_gradient_s: Seconds
    weight_gradient_s: Seconds
    send_s: Seconds
    step_s: Seconds
    saved_bytes: Bytes
    held_bytes: Bytes
    passing_bytes: Bytes


class Stage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage: it begins with the first op, in the order of the forward, whose name is `first` or lies in the module
    of that path (empty for the first op of all), and is held by pipeline rank `rank`. `cost` is None in a pipeline that
    nobody priced."""

    first: Annotated[str, Meta(max_length=1024)]
    rank: Place
    cost: StageCost | None = None


class Pipeline(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Stages in the order of the model; `schedule` holds, per pipeline rank, its compute actions in order, separated
    by spaces, in the text form of torch.distributed.pipelining. Gradients that a collective ends are added up over the
    micro-batches and reduced once in a step, or reduced in each and added up after it (`reduce_gradients`).
    `bubble_fraction` is the share of the step, until the
    last action ends, that the ranks are predicted to idle; None where nobody priced it.

    Pipeline rank r is played by the ranks r * n to r * n + n - 1, where n is the size of the plan's mesh.
    """

    ranks: Annotated[int, Meta(ge=1, le=2**16)]
    microbatches: Annotated[int, Meta(ge=1, le=2**20)]
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1, max_length=2**16)]
    schedule: Annotated[tuple[Annotated[str, Meta(max_length=2**24)], ...], Meta(min_length=1, max_length=2**16)]
    reduce_gradients: Literal["step", "microbatch"] = "step"
    bubble_fraction: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None

    @classmethod
    def of(
        cls,
        firsts: Sequence[str],
        schedule: Schedule,
        costs: Sequence[StageCost] = (),
        *,
        reduce_gradients: Literal["step", "microbatch"] = "step",
        bubble_fraction: float | None = None,
    ) -> Pipeline:
        """The pipeline whose stage s begins with `firsts[s]` and costs `costs[s]`, run by `schedule`."""
        priced = costs or [None] * len(firsts)
        parts = zip(firsts, schedule.placement, priced, strict=True)
        stages = tuple(Stage(first=first, rank=rank, cost=cost) for first, rank, cost in parts)
        rows = tuple(" ".join(str(a) for a in row if a.is_compute) for row in schedule.actions)
        return cls(
            ranks=schedule.ranks,
            microbatches=schedule.microbatches,
            stages=stages,
            schedule=rows,
            reduce_gradients=reduce_gradients,
            bubble_fraction=bubble_fraction,
        )

    @cached_property
    def order(self) -> Schedule:
        """The schedule as a value; RequestError for text that names no action."""
        return Schedule(
            microbatches=self.microbatches,
            placement=tuple(stage.rank for stage in self.stages),
            actions=tuple(tuple(parse_action(text) for text in row.split(" ") if text) for row in self.schedule),
        )

    def check(self) -> None:
        """RequestError unless every rank has a stage and the schedule does every stage's work in an order that ends,
        when between two ranks what is sent first is received first."""
        if len(self.schedule) != self.ranks:
            raise RequestError(f"'schedule' must have one row for each of {self.ranks} ranks, got {len(self.schedule)}")
        held = {stage.rank for stage in self.stages}
        if held != set(range(self.ranks)):
            raise RequestError(
                f"'stages' must give each of {self.ranks} pipeline ranks a stage, and no other rank, got "
                f"ranks {sorted(held)}"
            )
        progress(self.order)

"""A pipeline as a plan writes it down: where the model is cut, which ranks hold the stages, and in which order they
work.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct

from .actions import parse_action
from .errors import RequestError
from .schedules import Schedule

__all__ = ["Pipeline", "Stage"]

Place = Annotated[int, Meta(ge=0, lt=2**16)]


class Stage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage: it begins with the first op, in the order of the forward, whose name is `first` or lies in the module
    of that path (empty for the first op of all), and is held by pipeline rank `rank`."""

    first: Annotated[str, Meta(max_length=1024)]
    rank: Place


class Pipeline(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Stages in the order of the model; `schedule` holds, per pipeline rank, its compute actions in order, separated
    by spaces, in the text form of torch.distributed.pipelining.

    Pipeline rank r is played by the ranks r * n to r * n + n - 1, where n is the size of the plan's mesh.
    """

    ranks: Annotated[int, Meta(ge=1, le=2**16)]
    microbatches: Annotated[int, Meta(ge=1, le=2**20)]
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1, max_length=2**16)]
    schedule: Annotated[tuple[Annotated[str, Meta(max_length=2**24)], ...], Meta(min_length=1, max_length=2**16)]

    @classmethod
    def of(cls, firsts: tuple[str, ...], schedule: Schedule) -> Pipeline:
        """The pipeline whose stage s begins with `firsts[s]`, run by `schedule`."""
        stages = tuple(Stage(first=f, rank=r) for f, r in zip(firsts, schedule.placement, strict=True))
        rows = tuple(" ".join(str(a) for a in row if a.is_compute) for row in schedule.actions)
        return cls(ranks=schedule.ranks, microbatches=schedule.microbatches, stages=stages, schedule=rows)

    @cached_property
    def order(self) -> Schedule:
        """The schedule as a value; RequestError for text that names no action."""
        return Schedule(
            microbatches=self.microbatches,
            placement=tuple(stage.rank for stage in self.stages),
            actions=tuple(tuple(parse_action(text) for text in row.split(" ") if text) for row in self.schedule),
        )

    def check(self) -> None:
        """RequestError unless every rank has a stage and the schedule does every stage's work in an order that ends."""
        if len(self.schedule) != self.ranks:
            raise RequestError(f"'schedule' must have one row for each of {self.ranks} ranks, got {len(self.schedule)}")
        held = {stage.rank for stage in self.stages}
        if held != set(range(self.ranks)):
            raise RequestError(
                f"'stages' must give each of {self.ranks} pipeline ranks a stage, and no other rank, got "
                f"ranks {sorted(held)}"
            )
        self.order.check()

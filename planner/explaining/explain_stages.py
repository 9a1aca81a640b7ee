"""Why a plan's pipeline is as it is: what other schedules and other stages of the same sharding would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ...plans.errors import Infeasible
from ...plans.explanation import Alternative
from ...plans.facts import Fact
from ...plans.pipelines import Pipeline
from ...plans.plan import Plan
from ...plans.words import bytes_words
from ..pipeline import Clock
from ..stages.pipeline_draft import PipelineDraft
from ..stages.pipelined import Joined, rank_limits, sending, solved_units
from ..stages.staging import PUBLISHED, Staged, published_stages, restaged, stage_units
from ..stages.units import Unit

__all__ = ["other_pipelines"]

# Seconds, at most, for searching stages and schedule again.
_SEARCH_S = 10.0


def other_pipelines(
    plan: Plan, prepared: PipelineDraft, choices: Sequence[int], fact: Fact, *, time_limit_s: float
) -> Iterator[Alternative]:
    """Other pipelines of the same sharding: for the pipeline as a whole each published schedule on stages of even time,
    and what a search in `time_limit_s` seconds finds; for a stage, where it begins one unit earlier or later."""
    found = _Others(plan, prepared, choices)
    if fact.name == "pipeline":
        yield from found.published()
        yield from found.searched(min(_SEARCH_S, time_limit_s))
    else:
        yield from found.moved(int(fact.name.rpartition(".")[2]))


class _Others:
    """The units of a plan's sharding, and plans of other stages of them."""

    def __init__(self, plan: Plan, prepared: PipelineDraft, choices: Sequence[int]) -> None:
        assert prepared.held is not None
        self.plan, self.prepared, self.held = plan, prepared, prepared.held
        self.solution = prepared.given(choices)
        # Stages that begin within units cannot be moved by units: their own units are the stages.
        self.units: list[Unit] = solved_units(prepared, self.solution, starts=prepared.starts)
        self.send_s = sending(prepared, prepared.degrees)

    def published(self) -> Iterator[Alternative]:
        """The published schedules that these ranks and micro-batches can run."""
        ranks, count = self.held.ranks, self.held.microbatches
        for name in PUBLISHED:
            for staged in published_stages(self.units, ranks, count, (name,), self.send_s, skip=True):
                stages = staged.schedule.stages
                yield self._told(f"with {name} on {stages} stages of even time", "pipeline", staged)

    def searched(self, seconds: float) -> Iterator[Alternative]:
        """Stages and order searched for once more."""
        if seconds <= 0.0:
            return
        try:
            staged = stage_units(
                self.units, self.held.ranks, self.held.microbatches, send_s=self.send_s,
                limits=rank_limits(self.prepared, self.held.ranks), clock=Clock(limit_s=seconds),
            )  # fmt: skip
        except Infeasible:
            return
        yield self._told(f"with stages and schedule searched for again, {seconds:.2g} s", "pipeline", staged)

    def moved(self, number: int) -> Iterator[Alternative]:
        """Stage `number` beginning with the unit before its own, or with the one after."""
        stages, firsts = self.held.stages, [unit.first for unit in self.units]
        at = firsts.index(stages[number].first)
        for to in (at - 1, at + 1):
            before = firsts.index(stages[number - 1].first)
            after = firsts.index(stages[number + 1].first) if number + 1 < len(stages) else len(firsts)
            if number == 0 or not before < to < after:
                continue
            other = _with_first(self.held, number, firsts[to])
            staged = restaged(self.units, other, self.send_s)
            yield self._told(f"with stage {number} beginning at {firsts[to]}", f"pipeline.stages.{number}", staged)

    def _told(self, condition: str, subject: str, staged: Staged) -> Alternative:
        prepared = self.prepared
        over = staged.over_bytes(rank_limits(prepared, self.held.ranks))
        made = Joined(
            degrees=prepared.degrees, prepared=prepared, solution=self.solution, staged=staged, bound_s=0.0
        ).plan()
        return Alternative(
            condition=condition,
            status="priced",
            subject=subject,
            layout=None,
            predicted=made.predicted,
            bound_s=0.0,
            reason=f"{bytes_words(over)} over the limit" if over > 0 else "",
            changes=self.plan.diff(made),
        )


def _with_first(pipeline: Pipeline, number: int, first: str) -> Pipeline:
    stages = list(pipeline.stages)
    stages[number] = msgspec.structs.replace(stages[number], first=first, cost=None)
    return msgspec.structs.replace(pipeline, stages=tuple(stages))

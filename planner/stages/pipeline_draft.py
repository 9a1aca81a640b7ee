"""The problem of a plan with a pipeline, taken up again: one micro-batch on a rank's mesh, its solutions run by the
plan's own stages and schedule, or by ones that are searched for again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...passes.places import stage_starts
from ...plans.errors import ReplayError, RequestError
from ...plans.pipelines import Pipeline
from ...plans.plan import Options, Plan
from ..api import Draft
from ..checking.check import default_loss
from ..sharding.formulate import Formulation
from ..solver.problem import Solution
from .pipelined import Degrees, Joined, joined_draft, sending, solve_joined, solved_units
from .staging import Staged, restaged
from .units import unit_firsts

__all__ = ["PipelineDraft", "pipeline_draft"]


class PipelineDraft(Draft):
    """A draft whose solutions are written as plans with a pipeline.

    `degrees` are the pipeline's; `held` is the pipeline that every solution is run by, or None where the fastest one is
    searched for; `starts` are the held stages' first ops where the model's own units do not begin there.
    """

    degrees: Degrees
    held: Pipeline | None
    starts: tuple[str, ...] | None

    @classmethod
    def of(cls, prepared: Draft, pipeline: Pipeline) -> PipelineDraft:
        """The draft of one micro-batch with a pipeline that is held."""
        made = cls(
            prepared.captured, prepared.blocks, prepared.formulation, prepared.timeline, prepared.options,
            prepared.cluster, prepared.name,
        )  # fmt: skip
        made.degrees = Degrees(
            pipeline=pipeline.ranks, mesh=prepared.formulation.mesh, microbatches=pipeline.microbatches
        )
        made.held, made.starts = pipeline, None
        made._joined = {}
        return made

    _joined: dict[tuple[int, ...], Joined]

    def changed(self, formulation: Formulation, options: Options) -> PipelineDraft:
        """The same with another problem or other options."""
        made = super().changed(formulation, options)
        assert isinstance(made, PipelineDraft)
        made._joined = {}
        return made

    def write(self, solution: Solution) -> Plan:
        """The plan of a solution, its memory that of the fullest pipeline rank."""
        return self._run(solution).plan()

    def seconds(self, choices: Sequence[int]) -> float:
        """The step of the plan that makes these choices."""
        return self._run(self.given(choices)).step_s

    def solve(self, *, time_limit_s: float, gap: float, warm: Sequence[int] | None = None) -> Solution:
        """The sharding of least work and how long its step takes in the pipeline; no plan of these degrees, whatever
        its stages, takes less than its `bound_s`."""
        found = solve_joined(
            self, self.degrees, time_limit_s=time_limit_s, gap=gap, warm=warm,
            stage=None if self.held is None else self.stage,
        )  # fmt: skip
        assert found is not None
        self._joined[found.solution.choices] = found
        step, bound = found.step_s, min(found.bound_s, found.step_s)
        short = 1.0 - bound / step if step > 0 else 0.0
        return replace(found.solution, objective_s=step, bound_s=bound, gap=short)

    def stage(self, solution: Solution) -> Staged:
        """The units of a solution in the stages that are held."""
        assert self.held is not None
        units = solved_units(self, solution, starts=self.starts)
        return restaged(units, self.held, sending(self, self.degrees))

    def _run(self, solution: Solution) -> Joined:
        known = self._joined.get(solution.choices)
        if known is None:
            one = self.given(solution.choices)
            known = Joined(degrees=self.degrees, prepared=self, solution=one, staged=self.stage(one), bound_s=0.0)
            self._joined[solution.choices] = known
        return known


def pipeline_draft(
    plan: Plan, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, *, changed: bool, **request: Any
) -> PipelineDraft:
    """The draft of `model` under the request that `plan`, which has a pipeline, answers. A `changed` model may lack
    blocks in which the plan's stages begin: then its pipeline is not held."""
    pipeline = plan.pipeline
    assert pipeline is not None
    pipeline.check()
    plan.one_mesh("priced anew, explained by what else there is, or adapted")
    request["loss"] = request.get("loss") or default_loss
    degrees = Degrees(pipeline=pipeline.ranks, mesh=plan.mesh, microbatches=pipeline.microbatches)
    del request["mesh"]
    reduce = pipeline.reduce_gradients
    prepared = joined_draft(model, args, kwargs or {}, degrees, reduce=reduce, **request)
    firsts = tuple(stage.first for stage in pipeline.stages)
    fits = set(firsts) <= set(unit_firsts(prepared.captured, prepared.blocks))
    if fits or changed:
        made = PipelineDraft.of(prepared, pipeline)
        made.held = pipeline if fits and _same_lengths(plan, prepared) else None
        return made
    whole = joined_draft(model, args, kwargs or {}, degrees, reduce=reduce, whole=True, **request)
    try:
        stage_starts(whole.captured, firsts)
    except RequestError as error:
        raise ReplayError(
            f"'plan' must have stages that begin in this model, got others: {error}; plan again"
        ) from error
    made = PipelineDraft.of(whole, pipeline)
    made.starts = firsts
    return made


def _same_lengths(plan: Plan, prepared: Draft) -> bool:
    now = prepared.model().blocks
    return {(b.pattern, b.count) for b in plan.model.blocks} == {(b.pattern, b.count) for b in now}

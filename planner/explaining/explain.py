"""Why a plan is as it is: the exact next best without one of its choices, and what its limits cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ...cost_models.calibration import Calibration
from ...passes.recompute import Recompute
from ...plans.errors import ReplayError, RequestError
from ...plans.explanation import Alternative, Explanation, Limit
from ...plans.facts import PIPELINE_KINDS, Fact, facts_of
from ...plans.layouts import Layout
from ...plans.plan import Plan
from ...plans.words import bytes_words, layout_words, seconds_words
from ..api import Draft, draft
from ..apply import check_fits
from ..arguments import check_arguments
from ..sharding.constraints import Constraint
from ..sharding.own_rules import OpRule
from ..sharding.recall import Recalled, recall
from ..stages.pipeline_draft import PipelineDraft, pipeline_draft
from .explain_stages import other_pipelines
from .scenario import Found, Mask, Scenario

__all__ = ["Given", "draft_of", "explain", "reopen", "same_prices"]

Given = Calibration | str | os.PathLike[str] | None
LossFunction = Callable[[Any], torch.Tensor]

_NEEDS = (
    "The next best layout, and what the limits cost, take the model: give it (a SPEC on the command line), "
    "and it is planned again without the choice."
)
# Why what is told of a plan with a pipeline lies between two figures, beside time that ran out.
_HELD = "stages and order as they are"
_NO_LIMIT = 2**60 - 1
_EXACT = 1e-6
_GIB = 1 << 30


def explain(
    plan: Plan,
    names: str | Sequence[str] = (),
    model: nn.Module | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    layout: str | None = None,
    more_memory_bytes: int = 8 * _GIB,
    limits: bool | None = None,
    time_limit_s: float = 60.0,
    rules: Sequence[OpRule] = (),
    calibration: Given = None,
) -> Explanation:
    """Why `plan` lays what `names` mean as it does, what the next best would be, and what the request's limits cost.

    names         parameters, buffers, inputs, outputs and ops of the plan; `*` matches, `layers.3.wq.weight` also
                  means the `layers.*.wq.weight` that it shares its choice with
    model, args, kwargs, loss, rules, calibration    as the plan was made with. Without a model only what the plan
                  records is told
    layout        ask for this layout, e.g. "S(0),R", and not for the next best one
    more_memory_bytes, limits    also solve with so much more memory per device, without a limit, and without each
                  constraint; by default where no name is given
    time_limit_s  for all solves together; what could not be finished says what is proven

    The next best is the plan that is found when the choice is excluded and everything else may change: exact within
    1e-6, or with a bound where time ran out. Of several names it is the one that costs least to change. With a pipeline
    it is the sharding of least work, run by the plan's own stages and schedule; the names `pipeline` and
    `pipeline.stages.N` ask for other schedules and other stages of the same sharding. Raises
    RequestError for a name or layout that the plan does not have, ReplayError for another model.
    """
    check_arguments(
        plan=plan, names=names, args=args, kwargs=kwargs, loss=loss, layout=layout, limits=limits, rules=rules,
        more_memory_bytes=more_memory_bytes, time_limit_s=time_limit_s, calibration=calibration,
        **({} if model is None else {"model": model}),
    )  # fmt: skip
    asked = [names] if isinstance(names, str) else list(names)
    facts = facts_of(plan, asked)
    if model is None:
        return Explanation(predicted=plan.predicted, facts=facts, alternatives=(), limits=(), notes=(_NEEDS,))
    wanted = None if layout is None else Constraint.parse(f"{asked[0] if asked else '*'} = {layout}", plan.mesh.ndim)
    same_prices(plan, calibration)
    prepared, base = reopen(plan, model, args, kwargs, loss=loss, rules=rules, calibration=calibration)
    piped = [fact for fact in facts if fact.kind in PIPELINE_KINDS]
    others = _pipelines(plan, prepared, base, piped, time_limit_s)
    lighter: Callable[[], Draft] | None = None
    if plan.options.recompute == "block":
        again = {"loss": loss, "rules": rules, "calibration": calibration, "recompute": "pointwise"}
        lighter = partial(draft_of, plan, model, args, kwargs, **again)
    found = _Explainer(plan, prepared, base, lighter, time_limit_s)
    laid = [fact for fact in facts if fact not in piped]
    alternatives = [*others, *found.alternatives(laid, wanted)]
    told = tuple(found.limits(more_memory_bytes)) if limits or (limits is None and not asked) else ()
    return Explanation(
        predicted=plan.predicted,
        facts=facts,
        alternatives=tuple(sorted(alternatives, key=_rank)),
        limits=told,
        notes=tuple(found.notes),
    )


def _pipelines(
    plan: Plan, prepared: Draft, base: Recalled, facts: Sequence[Fact], time_limit_s: float
) -> Iterator[Alternative]:
    """Other pipelines than those that `facts` tell of."""
    if not isinstance(prepared, PipelineDraft):
        return
    choices = [base.choices[index] for index in range(len(prepared.formulation.decisions))]
    for fact in facts:
        yield from other_pipelines(plan, prepared, choices, fact, time_limit_s=time_limit_s / 2)


def reopen(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    rules: Sequence[OpRule] = (),
    calibration: Given = None,
) -> tuple[Draft, Recalled]:
    """The draft that `plan` was made from, its constraints not held, and the plan's choices in it.

    ReplayError names the first thing in which the model is another one."""
    prepared = draft_of(plan, model, args, kwargs, loss=loss, rules=rules, calibration=calibration)
    check_fits(plan, model, prepared.captured, prepared.blocks)
    found = recall(plan, prepared.formulation)
    if not found.whole or len(found.choices) < len(prepared.formulation.decisions):
        raise ReplayError(f"'plan' must make every choice of this model, got {_difference(found)}; plan again")
    return prepared, found


def draft_of(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    *,
    loss: LossFunction | None = None,
    rules: Sequence[OpRule] = (),
    recompute: Recompute | None = None,
    calibration: Given = None,
    changed: bool = False,
) -> Draft:
    """The draft of `model` under the request that `plan` answers, its constraints not held. `recompute` is taken in
    place of the plan's mode; a `changed` model may lack what a pipeline's stages begin with."""
    options = plan.options
    request: dict[str, Any] = dict(
        cluster=plan.cluster, mesh=plan.mesh, loss=loss, constraints=options.constraints, recipe=options.recipe or None,
        optimizer=options.optimizer, compiled=options.compiled, recompute=recompute or options.recompute,
        memory_limit_bytes=options.memory_limit_bytes, replicate=options.replicate, dynamic=options.dynamic,
        rules=rules, calibration=calibration, name=plan.model.name, held=False,
    )  # fmt: skip
    if plan.pipeline is not None:
        return pipeline_draft(plan, model, args, kwargs, changed=changed, **request)
    return draft(model, args, kwargs, **request)


def same_prices(plan: Plan, calibration: Given) -> None:
    """RequestError where the plan's prices are not those that it would be solved again with."""
    measured = Calibration.load(calibration) if isinstance(calibration, str | os.PathLike) else calibration
    cited = plan.calibration.startswith("calibration ")
    if cited and (measured is None or measured.cite() != plan.calibration):
        name = " ".join(plan.calibration.split()[:3])
        have = "none" if measured is None else " ".join(measured.cite().split()[:3])
        raise RequestError(f"'calibration' must be the one that the plan cites, {name}, got {have}; give its file")
    if measured is not None and not cited:
        raise RequestError(f"'calibration' must be left out, as the plan is priced by {plan.calibration}, got "
                           f"{measured.name}; replay the plan with it first")  # fmt: skip


def _difference(found: Recalled) -> str:
    if found.missing:
        return f"one without {found.missing[0]}"
    if found.unused:
        return f"one with {found.unused[0]}, which the model does not have"
    name, reason = next(iter(found.misfits.items()), ("a value", "no way leads where the plan wants it"))
    return f"one for {name}: {reason}"


def _rank(alternative: Alternative) -> float:
    return alternative.bound_s if alternative.predicted is None else alternative.predicted.step_time_s


class _Explainer:
    """The solves behind an explanation of one plan."""

    def __init__(
        self, plan: Plan, prepared: Draft, base: Recalled, lighter: Callable[[], Draft] | None, time_limit_s: float
    ) -> None:
        self.plan, self.base, self.lighter = plan, base, lighter
        self.scenario = Scenario.of(prepared, time_limit_s=time_limit_s)
        self.choices = [base.choices[index] for index in range(len(prepared.formulation.decisions))]
        self.now_s = prepared.seconds(self.choices)
        self.notes: list[str] = []

    def alternatives(self, facts: Sequence[Fact], wanted: Constraint | None) -> Iterator[Alternative]:
        """For every name the best plan in which it lies otherwise, or as `wanted`."""
        for number, fact in enumerate(facts):
            share = 1.0 / (len(facts) - number)
            yield self._alternative(fact, wanted, share)

    def _alternative(self, fact: Fact, wanted: Constraint | None, share: float) -> Alternative:
        if wanted is None:
            condition = f"next best with {fact.name} not {fact.layout.removeprefix('makes ')}"
        else:
            condition = f"with {fact.name} = {str(wanted).partition(' = ')[2]}"
        also = self._mask(fact.name, wanted)
        prepared = self.scenario.draft(also=[also])
        if not all(kept.any() for kept in also.values()):
            return self._told(condition, fact.name, Found(draft=prepared, solution=None, impossible=True), _only(fact))
        masked = self.scenario.draft().formulation.problem.nodes
        blocked = [i for i, kept in also.items() if not np.isfinite(np.where(kept, masked[i], np.inf)).any()]
        if blocked:
            reason = f"its constraints leave nothing else: {'; '.join(fact.constraints) or 'those of its neighbours'}."
            return self._told(condition, fact.name, Found(draft=prepared, solution=None, impossible=True), reason)
        found = self._told(condition, fact.name, self.scenario.solve(prepared, share=share))
        if found.predicted is not None and found.predicted.step_time_s < self.now_s * (1 - _EXACT):
            self._faster(found.predicted.step_time_s, condition.removeprefix("next best "))
        return found

    def _mask(self, name: str, wanted: Constraint | None) -> Mask:
        """What is left of the decisions behind `name` when its layout is excluded, or when it is `wanted`."""
        formulation, kept = self.scenario.open.formulation, {}
        for index in sorted(self.base.places.get(name, ())):
            made = [_first(strategy.outs) for strategy in formulation.decisions[index].strategies]
            now = made[self.choices[index]]
            kept[index] = np.array([m != now if wanted is None else m is not None and wanted.allows(m) for m in made])
        return kept

    def limits(self, more: int) -> Iterator[Limit]:
        """The memory limit and every constraint, each with the plan that is found when it is relaxed."""
        self._settle()
        yield self._memory(more)
        for number, constraint in enumerate(self.scenario.constraints):
            prepared = self.scenario.draft(without=[number])
            share = 1.0 / (len(self.scenario.constraints) - number)
            found = self._told("without it", "", self.scenario.solve(prepared, share=share, warm=self.choices))
            yield Limit(name=f"constraint {constraint}", binds=self._saves(found), relaxed=(found,))

    def _settle(self) -> None:
        """Find the best plan under the limits as they are, where the plan may be a little slower than that: what a
        limit costs is measured from there."""
        if self.plan.solver.gap <= _EXACT:
            return
        share = 1.0 / (3 + len(self.scenario.constraints))
        found = self.scenario.solve(self.scenario.draft(), share=share, warm=self.choices).solution
        if found is not None and found.objective_s < self.now_s * (1 - _EXACT):
            self.choices, self.now_s = list(found.choices), found.objective_s
            self._faster(found.objective_s, "under the same limits")

    def _faster(self, step_s: float, where: str) -> None:
        self.notes.append(
            f"A faster plan was found {where}, {seconds_words(step_s)}: this one was left with a gap of "
            f"{100 * self.plan.solver.gap:.2g} %; plan again with a smaller one."
        )

    def _memory(self, more: int) -> Limit:
        limit = self.scenario.open.limit
        share = 1.0 / (4 + len(self.scenario.constraints))
        tries = [("", self.scenario)]
        if self.lighter is not None:
            scenario = Scenario.of(self.lighter(), time_limit_s=self.scenario.left_s)
            tries.append((", recomputing pointwise ops only", scenario))
        relaxed: list[Alternative] = []
        for words, scenario in tries:
            start = self.choices if scenario is self.scenario else None
            solved = scenario.solve(scenario.draft(limit=_NO_LIMIT), share=share, warm=start)
            free = self._told(f"without a limit{words}", "", solved)
            if self._saves(free):
                solved = scenario.solve(scenario.draft(limit=limit + more), share=share, warm=start)
                relaxed.append(self._told(f"{bytes_words(more)} more a device{words}", "", solved))
            relaxed.append(free)
        name = f"memory limit of {bytes_words(limit)} per device"
        return Limit(name=name, binds=any(map(self._saves, relaxed)), relaxed=tuple(relaxed))

    def _saves(self, found: Alternative) -> bool:
        return found.predicted is not None and found.predicted.step_time_s < self.now_s * (1 - _EXACT)

    def _told(self, condition: str, subject: str, found: Found, reason: str = "") -> Alternative:
        if found.solution is None:
            status = "none" if found.impossible else "unknown"
            return Alternative(
                condition=condition,
                status=status,
                subject=subject,
                layout=None,
                predicted=None,
                bound_s=0.0 if found.impossible else self.plan.solver.bound_s,
                reason=reason or found.reason,
                changes=None,
            )
        other = found.draft.write(found.solution)
        index = next(iter(self.base.places.get(subject, ())), None)
        layout = None if index is None else self._layout(index, found.solution.choices[index])
        return Alternative(
            condition=condition,
            status="exact" if found.solution.gap <= _EXACT else "bounded",
            subject=subject,
            layout=layout,
            predicted=other.predicted,
            bound_s=max(0.0, found.solution.bound_s),
            reason=_HELD if isinstance(found.draft, PipelineDraft) else "",
            changes=self.plan.diff(other),
        )

    def _layout(self, index: int, choice: int) -> str:
        decision = self.scenario.open.formulation.decisions[index]
        return layout_words(_first(decision.strategies[choice].outs), self.plan.mesh)


def _first(layouts: Sequence[Layout | None]) -> Layout | None:
    return next((layout for layout in layouts if layout is not None), None)


def _only(fact: Fact) -> str:
    return f"{fact.name} cannot lie so: it has no such layout on this mesh."

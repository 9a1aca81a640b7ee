"""Replay across change: a plan priced anew, and a plan carried over to a model that has changed in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from ..plans.adapted import Adapted
from ..plans.errors import Infeasible
from ..plans.plan import Plan
from ..plans.stamps import paired
from .api import Draft
from .apply import check_torch
from .arguments import check_arguments
from .explaining.explain import Given, draft_of, reopen
from .explaining.scenario import Mask, Scenario
from .sharding.own_rules import OpRule
from .sharding.recall import Recalled, recall
from .stages.pipeline_draft import PipelineDraft

__all__ = ["adapt", "differences", "reprice"]

LossFunction = Callable[[Any], torch.Tensor]


def reprice(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    rules: Sequence[OpRule] = (),
    calibration: Given = None,
) -> Plan:
    """`plan` with the seconds and bytes that it is predicted to take by today's prices, or by those of a `calibration`;
    nothing is chosen anew.

    ReplayError names the first thing in which the model is another one.
    """
    prepared, found = reopen(plan, model, args, kwargs, loss=loss, rules=rules, calibration=calibration)
    choices = tuple(found.choices[index] for index in range(len(prepared.formulation.decisions)))
    now = prepared.write(prepared.given(choices))
    return msgspec.structs.replace(plan, predicted=now.predicted, calibration=now.calibration, pipeline=now.pipeline)


def adapt(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    rules: Sequence[OpRule] = (),
    time_limit_s: float = 60.0,
    calibration: Given = None,
) -> Adapted:
    """`plan` carried over to `model`: what the two have in common stays as it is, the rest is solved for.

    Parts are told by their names. Lists of equal blocks may have another length: the first block follows the first, the
    last the last, and those between the pattern of those between. A pipeline keeps its ranks and micro-batches, and
    its stages and schedule too where all blocks are there; else stages and schedule are searched for. Raises Infeasible
    where the parts that are carried over leave no plan, RequestError where a constraint of the plan names nothing in
    the model.
    """
    check_arguments(
        plan=plan, model=model, args=args, kwargs=kwargs, loss=loss, rules=rules, time_limit_s=time_limit_s,
        calibration=calibration,
    )  # fmt: skip
    check_torch(plan)
    prepared = draft_of(plan, model, args, kwargs, loss=loss, rules=rules, calibration=calibration, changed=True)
    found = recall(plan, prepared.formulation)
    scenario = Scenario.of(prepared, time_limit_s=time_limit_s)
    solved = scenario.solve(scenario.draft(also=[_pins(prepared, found)]), gap=1e-3)
    if solved.solution is None:
        raise Infeasible(
            f"'plan' must leave a plan for what is new in the model, got none: {solved.reason}; plan the model again"
        )
    return _told(solved.draft.write(solved.solution), found, plan, prepared)


def differences(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    rules: Sequence[OpRule] = (),
) -> Adapted:
    """In what `model` is another one than that of `plan`; nothing is solved, and the plan in it is `plan` itself."""
    prepared = draft_of(plan, model, args, kwargs, loss=loss, rules=rules, changed=True)
    return _told(plan, recall(plan, prepared.formulation), plan, prepared)


def _pins(prepared: Draft, found: Recalled) -> Mask:
    """Every choice that the plan makes is the only one left. Hubs follow from what they stand between."""
    pins: dict[int, np.ndarray] = {}
    for index, choice in found.choices.items():
        decision = prepared.formulation.decisions[index]
        if decision.kind != "hub":
            pins[index] = np.arange(len(decision.strategies)) == choice
    return pins


def _told(plan: Plan, found: Recalled, before: Plan, prepared: Draft) -> Adapted:
    pairs = paired(before.model.stamps(), prepared.model().stamps())
    lengths = tuple(
        f"{old.pattern}: {len(old.numbers)} -> {len(new.numbers)}"
        for old, new in pairs.items()
        if len(old.numbers) != len(new.numbers)
    )
    return Adapted(
        plan=plan,
        carried=len(found.places),
        new=found.missing,
        gone=found.unused,
        changed=tuple(f"{name}: {reason}" for name, reason in found.misfits.items()),
        lengths=lengths,
        recut=isinstance(prepared, PipelineDraft) and prepared.held is None,
    )

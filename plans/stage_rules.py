"""What must hold in a plan whose pipeline ranks have different meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from .errors import RequestError
from .layouts import Layout, is_partial
from .meshes import Mesh
from .steps import parse_step

if TYPE_CHECKING:
    from .plan import Crossing, Plan

__all__ = ["PlanRuleError", "check_stage_meshes"]


class PlanRuleError(Exception):
    """A rule that a plan breaks: the key, the rule and the value. `plan_file` turns it into a PlanError."""

    def __init__(self, key: str, rule: str, value: Any) -> None:
        super().__init__(key, rule)
        self.key = key
        self.rule = rule
        self.value = value if isinstance(value, str) else repr(value)[:400]


def check_stage_meshes(plan: Plan, check_sharding: Callable[[Plan], None]) -> None:
    """Raise PlanRuleError for the first rule that `plan.stage_meshes` breaks; `check_sharding` holds a plan of one
    mesh to the rules of tensors and nodes."""
    found = plan.stage_meshes
    if (found is not UNSET) != (plan.version == 2):
        raise PlanRuleError("version", "be 2 where there are 'stage_meshes' and 1 where not", plan.version)
    if found is UNSET:
        return
    if plan.pipeline is None:
        raise PlanRuleError("stage_meshes", "come with a 'pipeline'", "none")
    ranks = [rank for one in found.shardings for rank in one.ranks]
    wrong = len(set(ranks)) != len(ranks) or max(ranks) >= plan.pipeline.ranks or len(ranks) == plan.pipeline.ranks
    if wrong:
        rule = f"name each of the {plan.pipeline.ranks} pipeline ranks at most once, and leave one to the plan's mesh"
        raise PlanRuleError("stage_meshes.shardings", rule, ranks)
    meshes = plan.meshes()
    if sum(mesh.size for mesh in meshes) > plan.cluster.size:
        rule = f"have, over the pipeline's ranks, at most the cluster's {plan.cluster.size} devices"
        raise PlanRuleError("stage_meshes.shardings", rule, " + ".join(map(str, meshes)))
    for index, one in enumerate(found.shardings):
        try:
            check_sharding(plan.on_rank(one.ranks[0]))
        except PlanRuleError as error:
            raise PlanRuleError(f"stage_meshes.shardings[{index}].{error.key}", error.rule, error.value) from None
    _check_crossings(plan, found.crossings, (plan.mesh, *(one.mesh for one in found.shardings)))


def _check_crossings(plan: Plan, crossings: tuple[Crossing, ...], meshes: tuple[Mesh, ...]) -> None:
    known, stamps = {node.name for node in plan.nodes}, plan.model.stamps()
    seen: set[tuple[str, int, int]] = set()
    for index, one in enumerate(crossings):
        at, key = f"stage_meshes.crossings[{index}]", (one.value, one.before, one.after)
        _, mark, op = one.value.rpartition("::")
        names = {one.value, *(stamp.stamped(one.value) for stamp in stamps if stamp.number(one.value) is not None)}
        # What ops of several results give has names, but no entries, of its own.
        if not names & known and not (mark and op.removeprefix("bwd.").startswith("getitem")):
            raise PlanRuleError(f"{at}.value", "name an op of the plan", one.value)
        if key in seen:
            raise PlanRuleError(at, "be the only way of its value between these shardings", one.value)
        seen.add(key)
        if one.before == one.after or max(one.before, one.after) >= len(meshes):
            rule = f"lead from one to another of {len(meshes)} shardings"
            raise PlanRuleError(at, rule, f"{one.before} to {one.after}")
        _check_end(f"{at}.sent", one.sent, one.sent_steps, meshes[one.before])
        _check_end(f"{at}.landed", one.landed, one.landed_steps, meshes[one.after])


def _check_end(at: str, layout: Layout, steps: tuple[str, ...], mesh: Mesh) -> None:
    if len(layout) != mesh.ndim or any(is_partial(p) for p in layout):
        rule = f"have one placement, and no pending reduction, for each of the {mesh.ndim} mesh axes"
        raise PlanRuleError(at, rule, list(layout))
    for number, text in enumerate(steps):
        try:
            step = parse_step(text)
        except RequestError:
            raise PlanRuleError(f"{at}_steps[{number}]", "be a step such as 'all_gather(dp, 0)'", text) from None
        if step.axis not in mesh.axis_names:
            rule = f"run along one of the axes {sorted(mesh.axis_names)}"
            raise PlanRuleError(f"{at}_steps[{number}]", rule, text)

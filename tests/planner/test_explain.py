"""Explanations: the next best is what planning with the choice forbidden finds, and limits cost what they say."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from meshwright.planner.api import draft, plan
from meshwright.planner.checking.verify import random_plan
from meshwright.planner.explaining.explain import explain, reopen
from meshwright.planner.fitting import solve_within
from meshwright.planner.sharding.recall import recall
from meshwright.planner.solver.problem import evaluate
from meshwright.plans.errors import ReplayError, RequestError
from meshwright.plans.plan import Plan
from meshwright.specs import load_spec


class Net(nn.Module):
    def __init__(self, width: int = 8192) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def request() -> tuple[nn.Module, tuple]:
    with torch.device("meta"):
        return Net(), (torch.empty(16384, 8192),)


def planned(**options: object) -> Plan:
    return plan(*request(), cluster="h100-sxm:4", mesh="2x2", recompute="none", gap=1e-9, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["up.weight", "args.0", "down::einsum.0"])
def test_the_next_best_is_the_plan_with_the_choice_forbidden(name: str) -> None:
    base = planned()
    found = explain(base, name, *request())
    (best,) = found.alternatives
    entry = next(e for e in (*base.parameters, *base.inputs, *base.nodes) if e.name == name)
    layout = getattr(entry, "layout", None) or getattr(entry, "outputs")[0]  # noqa: B009
    other = planned(constraints=[f"{name} != {','.join(layout)}"])
    assert best.status == "exact" and best.predicted is not None and best.changes is not None
    assert best.predicted.step_time_s == pytest.approx(other.predicted.step_time_s, rel=1e-6)
    assert best.predicted.step_time_s >= base.predicted.step_time_s * (1 - 1e-9)
    assert any(change.name == name for change in best.changes.changes)
    assert "exact: no such plan is faster" in str(found)


def test_a_layout_that_is_asked_for_is_priced_as_if_pinned() -> None:
    base = planned()
    (asked,) = explain(base, "up.weight", *request(), layout="R,S(0)").alternatives
    pinned = planned(constraints=["up.weight = R,S(0)"])
    assert asked.predicted is not None
    assert asked.predicted.step_time_s == pytest.approx(pinned.predicted.step_time_s, rel=1e-6)
    (none,) = explain(base, "up.weight", *request(), layout="S(7),*").alternatives
    assert none.status == "none" and "no such layout" in none.reason


def test_of_a_group_the_cheapest_change_comes_first() -> None:
    found = explain(planned(), "*.weight", *request())
    assert [fact.name for fact in found.facts] == ["up.weight", "down.weight"]
    steps = [other.predicted.step_time_s for other in found.alternatives if other.predicted]
    assert len(steps) == 2 and steps == sorted(steps)


def test_limits_cost_what_solving_without_them_saves() -> None:
    without = planned(constraints=["up.weight = S(0),S(1)", "args.0 = S(0),*"])
    limit = int(0.92 * without.predicted.memory.peak_bytes)
    tight = planned(memory_limit_bytes=limit, constraints=["up.weight = S(0),S(1)", "args.0 = S(0),*"])
    memory, pinned, idle = explain(tight, (), *request(), more_memory_bytes=2**40).limits
    without = planned(constraints=["up.weight = S(0),S(1)", "args.0 = S(0),*"])
    assert memory.binds and pinned.binds and not idle.binds
    for relaxed in memory.relaxed:
        assert relaxed.status == "exact" and relaxed.predicted is not None
        assert relaxed.predicted.step_time_s == pytest.approx(without.predicted.step_time_s, rel=1e-6)
    other = planned(memory_limit_bytes=limit, constraints=["args.0 = S(0),*"])
    (relaxed,) = pinned.relaxed
    assert relaxed.predicted is not None
    assert relaxed.predicted.step_time_s == pytest.approx(other.predicted.step_time_s, rel=1e-6)


def test_what_a_constraint_leaves_no_other_way_for_says_so() -> None:
    base = planned(constraints=["up.weight = S(0),R"])
    (other,) = explain(base, "up.weight", *request()).alternatives
    assert other.status == "none" and "up.weight = S(0),R" in other.reason


def test_without_time_the_bound_is_that_of_the_plan() -> None:
    base = planned()
    (other,) = explain(base, "up.weight", *request(), time_limit_s=1e-9).alternatives
    assert other.status == "unknown" and other.bound_s == base.solver.bound_s
    assert "time ran out" in str(explain(base, "up.weight", *request(), time_limit_s=1e-9))


def test_without_a_model_only_what_is_recorded_is_told() -> None:
    found = explain(planned(), "up.weight")
    assert not found.alternatives and not found.limits and "take the model" in str(found)


def test_another_model_or_name_is_refused() -> None:
    base = planned()
    with pytest.raises(RequestError, match="near: up.weight"):
        explain(base, "up.wieght", *request())
    with torch.device("meta"):
        other = Net(4096)
    with pytest.raises(ReplayError):
        explain(base, "up.weight", other, (torch.empty(16384, 4096),))


def test_a_numbered_layer_is_explained_with_its_equals() -> None:
    model, args, kwargs = load_spec("vit-tiny").build()
    base = plan(model, args, kwargs, cluster="h100-sxm:2", mesh="2", recompute="none")
    found = explain(base, "layers.1.mlp.c_fc.weight", model, args, kwargs)
    assert found.facts[0].name == "layers.*.mlp.c_fc.weight" and found.facts[0].copies == 4
    assert found.alternatives[0].status == "exact"
    assert msgspec.json.decode(msgspec.json.encode(found))["facts"][0]["asked"] == "layers.1.mlp.c_fc.weight"


def test_a_plan_comes_back_as_choices_of_the_same_cost() -> None:
    """Up to hubs: two gathers of one tensor cost what one costs, which is how the plan is run."""
    model, args, kwargs = load_spec("vit-tiny").build()
    prepared = draft(model, args, kwargs, cluster="h100-sxm:4", mesh="4")
    best = solve_within(prepared)
    for made in (prepared.write(best), random_plan(prepared, 3)):
        found = recall(made, prepared.formulation)
        assert found.whole and len(found.choices) == len(prepared.formulation.decisions)
        choices = [found.choices[index] for index in range(len(found.choices))]
        seconds = evaluate(prepared.formulation.problem, choices)
        assert seconds <= made.predicted.step_time_s * (1 + 1e-9)
        assert made.solver.status == "random" or seconds == pytest.approx(best.objective_s, rel=1e-9)
    reopened, _ = reopen(prepared.write(best), model, args, kwargs)
    assert len(reopened.formulation.decisions) == len(prepared.formulation.decisions)

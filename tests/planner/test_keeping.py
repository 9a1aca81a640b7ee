"""Parameters kept gathered from the forward to the backward: one decision per parameter, one gather where it is kept,
the same numbers either way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.passes.keeping import is_keep
from meshwright.passes.local import localize
from meshwright.passes.lookup import PlanLookup
from meshwright.passes.split import split
from meshwright.planner.api import Draft, draft
from meshwright.planner.check import check_plan
from meshwright.planner.fitting import solve_within, within_rooms
from meshwright.planner.problem import brute_force, evaluate
from meshwright.plans import Plan
from meshwright.plans.marks import KEEP
from meshwright.specs import load_spec

TINY = ("llama-tiny", "gpt2-tiny", "mixtral-tiny")


class Squares(nn.Module):
    """Reads its parameter in the forward and again in the backward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, size, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.w.square()).sum()


@pytest.mark.parametrize("size", [4, 4096])
def test_the_optimum_with_a_kept_parameter_is_that_of_brute_force(size: int) -> None:
    prepared = draft(Squares(size), (torch.ones(size, size, device="meta"),), cluster="h100-sxm:2", recompute="none")
    problem = prepared.formulation.problem
    assert any(name.endswith(KEEP) for name in problem.names)
    rooms = np.full(prepared.timeline.end + 1, np.inf)
    got = within_rooms(prepared, rooms, 60.0, gap=1e-9)
    assert got.objective_s == pytest.approx(brute_force(problem).objective_s, rel=1e-9)
    assert evaluate(problem, got.choices) == pytest.approx(got.objective_s, rel=1e-9)


def collectives(prepared: Draft, plan: Plan) -> list[Counter[str]]:
    """How often each collective is run in the forward and in the backward of the first rank."""
    lookup, mesh = PlanLookup(plan), plan.mesh
    groups = [f"axis{axis}" for axis in range(mesh.ndim)]
    halves = split(localize(prepared.captured, lookup, mesh, (0,) * mesh.ndim, groups), early=True)
    both = (halves.forward.graph, halves.backward.graph)
    return [Counter(getattr(node.target, "_opname", "") for node in graph.nodes) for graph in both]


@pytest.mark.parametrize("spec", [TINY[0], *(pytest.param(s, marks=pytest.mark.slow) for s in TINY[1:])])
def test_a_kept_parameter_is_gathered_once_and_reduced_once(spec: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = load_spec(spec, layers=1, batch=4).build()
    seen = []
    for recipe in ("zero2", "fsdp"):
        prepared = draft(model, args, kwargs, recompute="pointwise", cluster="h100-sxm:2", recipe=recipe)
        plan = prepared.write(solve_within(prepared))
        report = check_plan(model, args, kwargs or {}, prepared.captured, plan, steps=2)
        assert report.equal and report.compared > 10, report.differences
        seen.append((prepared, collectives(prepared, plan)))
    (prepared, (kept, kept_later)), (_, (anew, anew_later)) = seen
    nodes = [node for node in prepared.captured.ops() if is_keep(node)]
    split_ones = len({n.name for n in prepared.captured.sources.values() if n.kind == "parameter"})
    assert len(nodes) > 5
    # Every parameter is gathered once in the forward; those that stand behind a node are not gathered again later.
    assert kept["all_gather_into_tensor"] == anew["all_gather_into_tensor"]
    assert kept_later["all_gather_into_tensor"] == anew_later["all_gather_into_tensor"] - len(nodes)
    assert kept_later["reduce_scatter_tensor"] == anew_later["reduce_scatter_tensor"] <= split_ones

"""Parameters kept gathered from the forward to the backward: one decision per parameter, one gather where it is kept,
the same numbers either way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import meshwright
from meshwright.passes.keeping import is_keep
from meshwright.passes.local import localize
from meshwright.passes.lookup import PlanLookup
from meshwright.passes.microbatches import microbatch
from meshwright.passes.split import split
from meshwright.passes.stage_work import stage_graphs
from meshwright.passes.stages import cut_stages
from meshwright.planner.api import Draft, draft
from meshwright.planner.checking.check import check_plan, default_loss
from meshwright.planner.fitting import solve_within, within_rooms
from meshwright.planner.solver.problem import brute_force, evaluate
from meshwright.plans import Plan
from meshwright.plans.marks import KEEP
from meshwright.specs import load_spec

GATHER = "all_gather_into_tensor"
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
    assert kept[GATHER] == anew[GATHER]
    assert kept_later[GATHER] == anew_later[GATHER] - len(nodes)
    assert kept_later["reduce_scatter_tensor"] == anew_later["reduce_scatter_tensor"] <= split_ones


def test_zero_1_holds_gradients_whole_and_zero_3_gathers_one_at_a_time() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    peaks = {}
    for recipe in ("zero1", "zero2", "zero3"):
        request = {"cluster": "cpu:2", "recipe": recipe, "recompute": "none", "optimizer": "none"}
        prepared = draft(model, (torch.ones(64, 64),), **request)  # type: ignore[arg-type]
        found = prepared.write(solve_within(prepared))
        assert found.recipe().ways == ("fsdp" if recipe == "zero3" else recipe,) and not found.recipe().exceptions
        peaks[recipe] = found.predicted.memory.peak_bytes
    weights = 4 * 64 * 64 * 4
    # Halves of the parameters throughout; whole gradients at the end, or whole parameters in the middle.
    assert min(peaks["zero1"], peaks["zero2"]) >= 1.5 * weights
    assert peaks["zero3"] <= min(peaks["zero1"], peaks["zero2"]) - 0.25 * weights


@pytest.mark.parametrize(
    ("spec", "ranks"), [("gpt2-tiny", 1), *(pytest.param(s, 2, marks=pytest.mark.slow) for s in TINY)]
)
def test_with_micro_batches_a_kept_parameter_is_gathered_once_in_a_step(spec: str, ranks: int) -> None:
    torch.manual_seed(0)
    model, args, kwargs = load_spec(spec, layers=ranks, batch=4).build()
    cluster, request = f"h100-sxm:{2 * ranks}", {"pipeline": ranks, "microbatches": 2, "time_limit_s": 5.0}
    seen = {}
    for recipe in ("zero2", "fsdp", "zero1")[: 2 if ranks == 1 else 3]:
        found = meshwright.plan(model, args, kwargs, cluster=cluster, mesh="2", recipe=recipe, **request)  # type: ignore[arg-type]
        assert found.pipeline is not None and found.recipe().ways == (recipe,)
        seen[recipe] = found
        if recipe != "fsdp":
            report = meshwright.check(model, args, kwargs, plan=found, steps=2)
            assert report.equal and report.compared > 10, report.differences
    assert seen["zero2"].predicted.memory.parameters_bytes > 1.5 * seen["fsdp"].predicted.memory.parameters_bytes
    if "zero1" in seen:
        assert seen["zero1"].predicted.memory.gradients_bytes > 1.5 * seen["zero2"].predicted.memory.gradients_bytes
    one = draft(model, *microbatch(args, kwargs or {}, 2), cluster=cluster, mesh="2", loss=default_loss).captured
    for recipe, found in seen.items():
        for stage in cut_stages(one, [stage.first for stage in found.pipeline.stages]):
            graphs = stage_graphs(stage, found, (0,), ["axis"]).graphs
            gathers = {k: [n for n in g.nodes if getattr(n.target, "_opname", "") == GATHER] for k, g in graphs.items()}
            assert bool(gathers["UNSHARD"]) == (recipe != "fsdp")
            assert not [n for k in "FB" for n in gathers[k] if n.meta["origin"][0].endswith(KEEP)]
            assert all(n.meta["origin"][0].endswith(KEEP) for n in gathers["UNSHARD"])

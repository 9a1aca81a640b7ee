"""Pipelines joined to sharding: units cost what the whole costs, stages fit, degrees are chosen."""

from __future__ import annotations

import itertools
import random
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import nn

from meshwright.planner.api import Draft, draft, plan
from meshwright.planner.fitting import solve_within
from meshwright.planner.sharding.accumulation import Accumulation
from meshwright.planner.stages.degrees import degrees_to_try
from meshwright.planner.stages.pipelined import Degrees, joined_draft, solve_joined
from meshwright.planner.stages.shares import shares_of
from meshwright.planner.stages.staging import balanced_cuts, fused
from meshwright.planner.stages.units import unit_firsts, unit_starts, units_of
from meshwright.planner.zoo import named_schedule
from meshwright.plans import Cluster, Infeasible, Mesh, Plan, PlanError, RequestError
from meshwright.specs import load_spec

from ..pipelines import pipelined
from .test_pipeline_runs import checked

CLUSTER = Cluster.parse("h100-sxm:8")


def call(name: str, **size: int) -> tuple[tuple[nn.Module, tuple, dict[str, Any]], Any]:
    spec = load_spec(name, **size)
    return spec.build(), spec.loss


def prepared(name: str = "llama-tiny", mesh: str = "2x2", **options: Any) -> Draft:
    built, loss = call(name, batch=8)
    return draft(*built, cluster="h100-sxm:4", mesh=mesh, loss=loss, **options)


@pytest.mark.parametrize(("count", "reduce"), [(1, "step"), (4, "step"), (4, "microbatch")])
def test_shares_add_up_to_the_objective(count: int, reduce: Literal["step", "microbatch"]) -> None:
    found = prepared(accumulation=Accumulation(microbatches=count, reduce=reduce))
    solution = solve_within(found)
    total = shares_of(found.formulation, solution.choices).total(found.formulation)
    assert total == pytest.approx(solution.objective_s, rel=1e-12)


def test_units_of_a_deep_model_cost_what_the_model_costs() -> None:
    built, loss = call("llama-tiny", batch=8, layers=7)
    found = draft(*built, cluster="h100-sxm:4", mesh="4", loss=loss, accumulation=Accumulation(microbatches=2))
    solution = solve_within(found)
    shares = shares_of(found.formulation, solution.choices)
    units = units_of(found.captured, found.write(solution), found.blocks, shares, Accumulation(microbatches=2))
    assert [u.first for u in units if u.first.startswith("layers.")] == [f"layers.{n}" for n in range(7)]
    seconds = sum(u.forward_s + u.input_s + u.weight_s for u in units) + sum(u.step_s for u in units) / 2
    assert seconds == pytest.approx(solution.objective_s, rel=1e-9)


class TwoHeads(nn.Module):
    """Two losses, each behind a head of its own; the second one predicts from what a block of its own makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head, self.further, self.second = nn.Linear(8, 12), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        first = nn.functional.cross_entropy(self.head(x), labels)
        return first + 0.3 * nn.functional.cross_entropy(self.second(self.further(x)), labels)


def test_several_heads_are_units_of_their_own() -> None:
    torch.manual_seed(0)
    model, args = TwoHeads().double(), (torch.randn(4, 8).double(), torch.randint(12, (4,)))
    found = draft(model, *((args, {})), cluster="cpu:1", mesh="1", recompute="none")
    firsts = unit_firsts(found.captured, found.blocks)
    assert firsts == unit_starts(found.captured, found.blocks)
    assert firsts[1:] == ["layers.1", "head", "further", "second"]
    cut = {"schedule": named_schedule("zb-v", 2, 2), "firsts": ("", "head", "further", "second")}
    made, captured = pipelined(model, args, mesh="1", seed=0, **cut)
    assert checked(model, args, made, captured).equal


@pytest.mark.slow
def test_units_by_three_blocks_are_those_of_all_blocks() -> None:
    built, loss = call("llama-tiny", batch=8, layers=5)
    rows = []
    for whole in (False, True):
        found = draft(*built, cluster="h100-sxm:4", mesh="4", loss=loss, whole=whole)
        solution = solve_within(found, gap=0.0)
        shares = shares_of(found.formulation, solution.choices)
        rows.append(units_of(found.captured, found.write(solution), found.blocks, shares, Accumulation()))
    for one, other in zip(*rows, strict=True):
        assert (one.first, one.held_bytes, one.saved_bytes) == (other.first, other.held_bytes, other.saved_bytes)
        assert one.forward_s == pytest.approx(other.forward_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_balanced_cuts_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.random() for _ in range(9)]

    def largest(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    for stages in (1, 2, 4):
        every = itertools.combinations(range(1, len(costs)), stages - 1)
        assert largest(balanced_cuts(costs, stages)) == pytest.approx(min(map(largest, every)))


def test_w_is_fused_with_i_where_asked() -> None:
    schedule = named_schedule("zb-h1", 2, 3)
    whole = fused(schedule, 1, apart=True)
    whole.check()
    assert [str(a) for a in whole.actions[1]] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    assert whole.actions[0] == schedule.actions[0]
    near = fused(schedule, 0, apart=False)
    near.check()
    pairs = zip(schedule.actions[0], schedule.actions[0][1:], strict=False)
    assert len(schedule.actions[0]) - len(near.actions[0]) == sum(
        (a.kind, b.kind, a.microbatch) == ("I", "W", b.microbatch) for a, b in pairs
    )


def joined(degrees: Degrees, **options: Any) -> Any:
    built, loss = call("llama-tiny", batch=16, layers=6)
    found = joined_draft(*built, degrees, cluster="h100-sxm:4", loss=loss, **options)
    return solve_joined(found, degrees, time_limit_s=2.0)


def test_one_rank_and_one_micro_batch_is_the_plan_without_a_pipeline() -> None:
    one = joined(Degrees(pipeline=1, mesh=Mesh.parse("4"), microbatches=1))
    built, loss = call("llama-tiny", batch=16, layers=6)
    assert one.step_s == pytest.approx(
        solve_within(draft(*built, cluster="h100-sxm:4", mesh="4", loss=loss)).objective_s
    )


def test_a_pipeline_is_written_read_and_bounded() -> None:
    made = joined(Degrees(pipeline=2, mesh=Mesh.parse("2"), microbatches=4)).plan()
    assert Plan.from_bytes(made.to_bytes()) == made
    assert made.pipeline is not None
    for wrong in ("layers.6", "nowhere", ""):
        stages = (made.pipeline.stages[0], msgspec.structs.replace(made.pipeline.stages[1], first=wrong))
        pipeline = msgspec.structs.replace(made.pipeline, stages=(*stages, *made.pipeline.stages[2:]))
        with pytest.raises(PlanError, match=r"pipeline.stages\[1\].first"):
            msgspec.structs.replace(made, pipeline=pipeline).to_bytes()
    assert made.pipeline.ranks == 2
    assert made.pipeline.microbatches == 4
    assert 0 < made.solver.bound_s <= made.predicted.step_time_s
    assert made.predicted.memory.peak_bytes <= (made.predicted.memory.limit_bytes or 0)


def test_a_pipeline_that_does_not_fit_says_by_how_much() -> None:
    degrees = Degrees(pipeline=2, mesh=Mesh.parse("2"), microbatches=4)
    with pytest.raises(Infeasible, match="'memory_limit_bytes' must leave a plan of 2 x 2, 4 micro-batches"):
        joined(degrees, memory_limit_bytes=100_000, recompute="pointwise")


def test_degrees_use_all_devices_and_divide_the_batch() -> None:
    tries = list(degrees_to_try(CLUSTER, 16, pipeline="auto", mesh=None, microbatches="auto"))
    assert {one.pipeline for one in tries} == {1, 2, 4, 8}
    assert all(one.devices == 8 and 16 % one.microbatches == 0 for one in tries)


@pytest.mark.parametrize(
    ("pipeline", "mesh", "count", "what"),
    [(3, None, "auto", "pipeline"), (2, "8", 2, "mesh"), (2, "4", 17, "microbatches"), (0, None, 1, "pipeline")],
)
def test_degrees_that_leave_devices_or_samples_over_are_refused(
    pipeline: int, mesh: str | None, count: Any, what: str
) -> None:
    grid = None if mesh is None else Mesh.parse(mesh)
    with pytest.raises(RequestError, match=f"'{what}'"):
        list(degrees_to_try(CLUSTER, 16, pipeline=pipeline, mesh=grid, microbatches=count))


@pytest.mark.slow
def test_the_chosen_degrees_are_no_slower_than_any_that_were_tried() -> None:
    built, loss = call("llama-tiny", batch=8)
    options = {"cluster": "h100-sxm:4", "loss": loss, "time_limit_s": 20.0}
    best = plan(*built, pipeline="auto", microbatches=4, **options)
    for ranks in (1, 2):
        other = plan(*built, pipeline=ranks, microbatches=4, **options)
        assert best.predicted.step_time_s <= other.predicted.step_time_s * 1.001

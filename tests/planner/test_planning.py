"""Planning: what comes out is optimal for the problem it states, keeps its limits, and does not depend on how blocks
are captured."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.planner.api import draft, plan
from meshwright.planner.fitting import solve_within, within_rooms
from meshwright.planner.sharding.floor import least_bytes
from meshwright.planner.sharding.optimizers import Optimizer
from meshwright.planner.solver.problem import brute_force, evaluate
from meshwright.planner.solver.sampling import sample
from meshwright.plans.errors import Infeasible, RequestError
from meshwright.plans.plan import Options
from meshwright.specs import load_spec


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def big_net() -> tuple[nn.Module, tuple]:
    with torch.device("meta"):
        return Net(8192), (torch.empty(16384, 8192),)


@pytest.mark.parametrize(
    ("spec", "recompute"),
    [
        ("gpt2-tiny", "block"),
        pytest.param("vit-tiny", "none", marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", "none", marks=pytest.mark.slow),
        pytest.param("vit-tiny", "block", marks=pytest.mark.slow),
        pytest.param("llama-tiny", "none", marks=pytest.mark.slow),
        pytest.param("llama-tiny", "block", marks=pytest.mark.slow),
    ],
)
def test_three_blocks_give_the_plan_of_all_blocks(spec: str, recompute: str) -> None:
    """A deep model captured by three of its blocks has the same optimum, memory and choices as captured whole."""
    found = []
    for whole in (False, True):
        model, args, kwargs = load_spec(spec, layers=7).build()
        prepared = draft(model, args, kwargs, cluster="h100-sxm:2", mesh="2", whole=whole, recompute=recompute)  # type: ignore[arg-type]
        free = solve_within(prepared, gap=1e-9)
        peak = prepared.write(free).predicted.memory.peak_bytes
        prepared.options = _limited(prepared.options, int(0.8 * peak))
        tight = prepared.write(solve_within(prepared, gap=1e-9))
        assert tight.predicted.memory.peak_bytes <= 0.8 * peak
        found.append((free.objective_s, peak, tight.solver.objective_s, tight.predicted.memory, len(tight.nodes)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    # Under a limit the rooms follow from what was counted of the plans met, which are not the same ones.
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-3)
    assert found[0][1] == found[1][1]


def _limited(options: Options, limit: int) -> Options:
    values = {name: getattr(options, name) for name in options.__struct_fields__} | {"memory_limit_bytes": limit}
    return type(options)(**values)


@pytest.mark.parametrize("limited", [False, True])
def test_the_optimum_is_that_of_brute_force(limited: bool) -> None:
    """On a graph small enough to try every combination; hubs and free nodes are left out by holding them fixed."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.w).sum()

    prepared = draft(Tiny(), (torch.randn(4, 4),), cluster="h100-sxm:2", mesh="2", recompute="none")
    problem = prepared.formulation.problem
    assert 1 < len(list(itertools.islice(itertools.product(*map(range, problem.sizes)), 10**6)))
    rooms = np.full(prepared.timeline.end + 1, math.inf)
    if limited:
        free = solve_within(prepared)
        moments = range(prepared.timeline.end + 1)
        rooms[:] = 0.9 * float(prepared.timeline.profile(free.choices).max())
        problem = replace(problem, rows=tuple(prepared.timeline.row(m, rooms[m]) for m in moments))
    got = within_rooms(prepared, rooms, 60.0, gap=1e-9)
    want = brute_force(problem)
    assert got.objective_s == pytest.approx(want.objective_s, rel=1e-9)
    assert evaluate(problem, got.choices) == pytest.approx(got.objective_s, rel=1e-9)


def test_no_plan_takes_less_than_the_least() -> None:
    """The floors that are told before pricing and before solving are under every plan, and near the best ones."""
    model, args, kwargs = load_spec("gpt2-tiny", layers=5).build()
    for mode in ("pointwise", "block"):
        prepared = draft(model, args, kwargs, cluster="h100-sxm:4", mesh="2x2", recompute=mode)
        problem, timeline = prepared.formulation.problem, prepared.timeline
        floor = least_bytes(prepared.captured, prepared.blocks, Optimizer.of("adamw"), 4)
        least = timeline.least(problem)
        assert 0 < floor <= least.max() * (1 + 1e-9)
        for seed in range(3):
            assert (least <= timeline.profile(sample(problem, random.Random(seed))) * (1 + 1e-9)).all()
    with pytest.raises(Infeasible, match="no plan needs less"):
        plan(model, args, kwargs, cluster="h100-sxm:4", mesh="2x2", memory_limit_bytes=int(0.5 * floor))


@pytest.mark.slow
def test_blocks_are_recomputed_where_memory_makes_that_faster() -> None:
    """Where the limit binds, `auto` is as fast as the faster of the two modes."""
    model, args, kwargs = load_spec("gpt2-tiny", layers=5).build()
    request: dict = {"cluster": "h100-sxm:2", "mesh": "2"}
    limit = int(0.7 * plan(model, args, kwargs, recompute="pointwise", **request).predicted.memory.peak_bytes)
    times = []
    for mode in ("auto", "pointwise", "block"):
        made = plan(model, args, kwargs, recompute=mode, memory_limit_bytes=limit, **request)  # type: ignore[arg-type]
        times.append(made.predicted.step_time_s)
    assert times[0] == pytest.approx(min(times), rel=2e-3)


def test_weights_are_split_when_memory_is_short() -> None:
    model, args = big_net()
    roomy = plan(model, args, cluster="h100-sxm:8", mesh="8")
    whole = roomy.predicted.memory.peak_bytes
    tight = plan(model, args, cluster="h100-sxm:8", mesh="8", memory_limit_bytes=int(0.85 * whole))
    assert tight.predicted.memory.peak_bytes <= 0.85 * whole
    assert tight.predicted.step_time_s >= roomy.predicted.step_time_s * (1 - 1e-9)


def test_an_impossible_limit_names_memory_and_the_shortfall() -> None:
    model, args = big_net()
    with pytest.raises(Infeasible, match=r"memory limit of 1000 bytes.*at least.*too much"):
        plan(model, args, cluster="h100-sxm:8", mesh="8", memory_limit_bytes=1000)


def test_constraints_pin_and_forbid() -> None:
    model, args = big_net()
    pinned = plan(
        model, args, cluster="h100-sxm:4", mesh="2x2", constraints=["up.weight = S(0),R", "down.weight != R,R"]
    )
    layouts = {t.name: t.layout for t in pinned.parameters}
    assert layouts["up.weight"] == ("S(0)", "R")
    assert layouts["down.weight"] != ("R", "R")
    assert pinned.options.constraints == ("up.weight = S(0),R", "down.weight != R,R")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("up.wieght = S(0)", "near: up.weight"),
        ("up.weight = S(7)", "must leave up.weight a layout"),
        ("up.weight S(0)", "NAME = LAYOUT"),
        ("up.weight = S(0),R", "each of the 1 mesh axes"),
    ],
)
def test_a_wrong_constraint_says_what_would_be_right(text: str, words: str) -> None:
    model, args = big_net()
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        plan(model, args, cluster="h100-sxm:2", mesh="2", constraints=[text])


def test_a_constraint_on_one_block_leaves_the_others_free() -> None:
    model, args, kwargs = load_spec("llama-tiny", layers=6).build()
    found = plan(
        model, args, kwargs, cluster="h100-sxm:2", mesh="2", constraints=["layers.3.attention.wq.weight = S(1)"]
    )
    layouts = {t.name: t.layout for t in found.parameters}
    assert layouts["layers.3.attention.wq.weight"] == ("S(1)",)
    assert layouts["layers.*.attention.wq.weight"] == ("R",)


def test_planning_two_meshes_in_one_process_changes_nothing() -> None:
    model, args = big_net()
    first = plan(model, args, cluster="h100-sxm:8", mesh="8")
    plan(model, args, cluster="h100-sxm:4", mesh="2x2")
    again = plan(model, args, cluster="h100-sxm:8", mesh="8")
    assert again.predicted == first.predicted
    assert again.nodes == first.nodes


def test_the_fallback_solver_finds_the_same_optimum() -> None:
    model, args = big_net()
    found = [
        plan(model, args, cluster="h100-sxm:4", mesh="4", solver=s, gap=1e-9).solver.objective_s
        for s in ("highs", "cbc")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-9)

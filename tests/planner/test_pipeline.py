"""The pipeline search: known optima, bounds against all orders, and never above the published schedules."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cost_models.pipeline import StageCosts, simulate
from meshwright.cost_models.pipeline.arrays import Arrays
from meshwright.planner.pipeline import (
    Clock,
    LayerProfile,
    exact_time,
    fixed_stages_bound,
    profile_bound,
    tune_orders,
    tune_profile,
)
from meshwright.planner.pipeline.flow_bound import flow_bound
from meshwright.planner.pipeline.listing import Listed, ListScratch
from meshwright.planner.pipeline.plans import Plan, Search, refresh, settle
from meshwright.planner.pipeline.refute import refuted
from meshwright.plans import Action, Infeasible, RequestError, Schedule

ROWS = json.loads((Path(__file__).parent / "pipeline_rows.json").read_text())


def equal_row(row: dict[str, Any]) -> StageCosts:
    return StageCosts.equal(row["p"], row["F"], row["B"], row["W"], row["comm"])


@pytest.mark.parametrize("row", ROWS["optima"], ids=lambda row: f"{row['p']}-{row['m']}-{row['max_mem']}-{row['F']}")
def test_known_optima(row: dict[str, Any]) -> None:
    p, m = row["p"], row["m"]
    found = tune_orders(equal_row(row), range(p), p, m, limits=[row["max_mem"]] * p, clock=Clock(limit_s=20.0))
    assert found.simulation.longest_stage_time == row["longest_stage_time"]
    assert found.lower_bound == found.simulation.makespan and found.fits


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS["zb_auto"], ids=lambda row: f"{row['p']}-{row['m']}-{row['max_mem']}-{row['F']}")
def test_equal_stages_are_never_worse_than_the_public_scheduler(row: dict[str, Any]) -> None:
    p, m = row["p"], row["m"]
    limit_s = 5.0 if p * m < 2000 else 20.0
    found = tune_orders(equal_row(row), range(p), p, m, limits=[row["max_mem"]] * p, clock=Clock(limit_s=limit_s))
    assert found.simulation.makespan <= row["makespan"] * (1 + 1e-9) and found.fits


def all_orders(stage: int, microbatches: int, limit: float) -> list[tuple[str, ...]]:
    """Every order of F, I and W of one stage that keeps data and memory."""
    found = []
    for word in set(itertools.permutations("F" * microbatches + "I" * microbatches + "W" * microbatches)):
        count = {"F": 0, "I": 0, "W": 0}
        good = True
        for kind in word:
            count[kind] += 1
            held = 2 * count["F"] - count["I"] - count["W"]
            good = good and count["F"] >= count["I"] >= count["W"] and held <= limit
        if good:
            found.append(word)
    return found


def as_actions(stage: int, word: tuple[str, ...]) -> tuple[Action, ...]:
    count = {"F": 0, "I": 0, "W": 0}
    row = []
    for kind in word:
        row.append(Action(stage, kind, count[kind]))
        count[kind] += 1
    return tuple(row)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_bound_and_search_against_every_order(seed: int) -> None:
    rng = random.Random(seed)
    numbers = [tuple(float(rng.randint(1, 9)) for _ in range(2)) for _ in range(3)]
    delay, limit = float(rng.randint(0, 2)), float(rng.choice([2, 4, 4, 6]))
    costs = StageCosts(forward=numbers[0], input_gradient=numbers[1], weight_gradient=numbers[2], delay=delay)
    words = [all_orders(stage, 2, limit) for stage in (0, 1)]
    best = float("inf")
    for pair in itertools.product(*words):
        actions = tuple(as_actions(stage, word) for stage, word in enumerate(pair))
        try:
            time = simulate(Schedule(microbatches=2, placement=(0, 1), actions=actions), costs).makespan
        except RequestError:
            continue
        best = min(best, time)
    problem = (costs.complete(), (0, 1), 2, [limit] * 2)
    assert fixed_stages_bound(*problem) <= best
    assert not refuted(*problem, best)
    found = tune_orders(costs, (0, 1), 2, 2, limits=[limit] * 2, clock=Clock(limit_s=0.5))
    assert found.simulation.makespan == best >= found.lower_bound


def profile(layers: int, head: float) -> LayerProfile:
    return LayerProfile(
        name="made up",
        unit="s",
        symbols="T" * layers + "L",
        costs=((1.0, 1.6, 0.2),) * layers + ((head, head / 4, head / 8),),
        layers=(1,) * layers + (0,),
        memory=(2.0,) * layers + (0.0,),
    )


def test_a_profile_is_never_below_its_bound_or_above_the_published() -> None:
    made = profile(8, 6.0)
    limit = made.one_f_one_b_memory(2, 4)
    found = tune_profile(made, 2, 4, limits=[limit] * 2, clock=Clock(limit_s=6.0))
    assert found.fits and found.cuts is not None and found.lower_bound <= found.simulation.makespan
    assert found.simulation.makespan <= 1.1 * found.lower_bound
    assert found.costs == made.stage_costs(found.cuts)
    assert found.lower_bound >= sum(map(sum, made.costs)) * 4 / 2
    # More memory never raises the bound, given the time to prove it.
    free, held = (profile_bound(made, 2, 4, limits=limits, seconds=60.0) for limits in (None, [limit] * 2))
    assert free <= held * (1 + 1e-6)


def test_single_layers_packed_from_both_ends_come_near_the_bound() -> None:
    made = profile(16, 3.0)
    limit = made.one_f_one_b_memory(4, 8)
    found = tune_profile(made, 4, 8, limits=[limit] * 4, clock=Clock(limit_s=2.5))
    assert found.fits and found.costs.stages > 4
    assert found.simulation.makespan <= 1.08 * found.lower_bound


def listed(seed: int) -> bool:
    """Whether a random plan, listed back and forth, is one that the simulator and the memory limit allow."""
    rng = random.Random(seed)
    units, ranks, microbatches = rng.randint(3, 9), rng.randint(1, 3), rng.randint(1, 6)
    generator = np.random.default_rng(seed)
    costs = [(*map(float, generator.integers(0, 9, 3)), 2.0) for _ in range(units)]
    prefix = np.concatenate([np.zeros((1, 4)), np.cumsum(np.array(costs), axis=0)]).T.copy()
    place = generator.integers(0, ranks, units)
    limits = np.full(ranks, 2.0 * units * rng.choice((1.0, 1.5, 3.0)))
    key = generator.random((2 * units, microbatches)) * 30
    most = generator.integers(1, microbatches + 1, units)
    plan = Plan(np.arange(1, units), place, key, most)

    def blank() -> Listed:
        sizes = np.zeros(units), np.zeros(4 * units), np.zeros(4 * units), np.zeros(units), np.zeros(units)
        return Listed(sizes[0].astype(np.int64), *sizes[1:], limits, np.zeros(ranks))

    scratch = ListScratch.make(ranks, units, microbatches)
    delays = np.full(units, float(rng.randint(0, 2)))
    work = (np.zeros(ranks), np.zeros_like(key), np.array([1], np.int64))
    search = Search(prefix, 0.0, delays, blank(), blank(), scratch, *work)
    refresh(plan, search, 0.5 * rng.randint(0, 2))
    step = settle(search, key, most, np.array([0.5, 1.0, 1.0, 1.0]), 2, float("inf"))
    forth = search.forth
    arrays = Arrays(**{**forth._asdict(), "microbatches": microbatches})
    found = scratch.orders(arrays, plan.cuts)
    # A forward that waits to be the oldest starts sooner once the orders are written.
    return found is not None and found.step <= step


@pytest.mark.parametrize("cases", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_lists_back_and_forth_stay_allowed(cases: int) -> None:
    assert all(listed(seed) for seed in range(cases))


def test_what_cannot_fit_is_said() -> None:
    costs = StageCosts.equal(2, 1.0, 1.0, 1.0)
    with pytest.raises(Infeasible, match="rank 0 needs 2, 1 more"):
        tune_orders(costs, (0, 1), 2, 2, limits=[1.0, 2.0], clock=Clock(limit_s=1.0))
    with pytest.raises(Infeasible, match="use fewer ranks"):
        tune_profile(profile(2, 1.0), 4, 2, clock=Clock(limit_s=1.0))
    with pytest.raises(RequestError, match="equal micro-batches"):
        varied = StageCosts(forward=(1.0,), input_gradient=(1.0,), weight_gradient=(1.0,), microbatch_scale=(1.0, 2.0))
        tune_orders(varied, (0,), 1, 2, clock=Clock(limit_s=1.0))


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16) if seed != 3)])
def test_the_search_finds_what_an_integer_program_proves(seed: int) -> None:
    rng = random.Random(seed)
    units, microbatches = (4, 2) if seed % 4 else (3, 3)
    made = LayerProfile(
        name="made up",
        unit="s",
        symbols="T" * units,
        costs=tuple((rng.randint(1, 9), rng.randint(1, 9), rng.randint(0, 9)) for _ in range(units)),
        layers=(1,) * units,
        memory=(2.0,) * units,
        delay=float(rng.randint(0, 2)),
    )
    limits = None if seed % 2 else [float(rng.choice((6, 8)))] * 2
    reached, proved = exact_time(made, 2, microbatches, limits=limits)
    found = tune_profile(made, 2, microbatches, limits=limits, clock=Clock(limit_s=1.0))
    assert found.simulation.makespan == pytest.approx(reached, rel=1e-6)
    assert found.lower_bound <= proved * (1 + 1e-6) and proved == pytest.approx(reached, rel=1e-6)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40) if seed != 2)])
def test_no_plan_is_faster_than_the_flow_bound(seed: int) -> None:
    rng = random.Random(seed)
    units, ranks, microbatches = rng.randint(2, 7), 2, rng.randint(1, 6)
    kinds = [tuple(float(rng.randint(0, 9)) for _ in range(3)) for _ in range(2)]
    costs = [*rng.choices(kinds, k=units - 1), (rng.randint(1, 30), rng.randint(0, 20), rng.randint(0, 9))]
    made = LayerProfile(
        name="made up",
        unit="s",
        symbols="T" * units,
        costs=tuple(costs),
        layers=(1,) * units,
        memory=(2.0,) * (units - 1) + (rng.choice((0.0, 2.0)),),
        delay=float(rng.randint(0, 1)),
    )
    limit = 2.0 * units * rng.choice((0.7, 1.0, 1.5))
    found = tune_profile(made, ranks, microbatches, limits=[limit] * ranks, clock=Clock(limit_s=0.8))
    reached = found.simulation.makespan
    # Alone, from below what it can prove, it must stop below what a schedule reaches.
    bound = 0.6 * reached
    for _ in range(3):
        bound = flow_bound(made, ranks, microbatches, limit=limit, low=bound, seconds=0.5)
    assert 0.6 * reached < bound <= reached * (1 + 1e-9)


def test_memory_and_a_heavy_head_raise_the_bound() -> None:
    made = profile(64, 12.8)
    limit = made.one_f_one_b_memory(8, 16)
    held, free = (
        flow_bound(made, 8, 16, limit=most, low=made_work(made, 16) / 8, seconds=20.0) for most in (limit, math.inf)
    )
    assert held > 1.03 * free > 1.03 * made_work(made, 16) / 8


def made_work(made: LayerProfile, microbatches: int) -> float:
    return microbatches * sum(map(sum, made.costs))


def test_a_profile_too_large_to_be_solved_exactly_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 40 actions"):
        exact_time(profile(8, 6.0), 2, 4)

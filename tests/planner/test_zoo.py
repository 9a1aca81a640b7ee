"""The published schedules against their closed forms and against what their public generators give."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost_models.pipeline import Simulation, StageCosts, simulate
from meshwright.planner.zoo import SCHEDULE_NAMES, chunks_of, named_schedule
from meshwright.plans import RequestError

ROWS = json.loads((Path(__file__).parent / "pipeline_rows.json").read_text())
CASES = [12, pytest.param(1000, marks=pytest.mark.slow)]


def run(name: str, p: int, m: int, f: float, b: float, w: float, c: float = 0.0) -> Simulation:
    schedule = named_schedule(name, p, m, costs=(f, b, w), delay=c)
    schedule.check()
    return simulate(schedule, StageCosts.equal(schedule.stages, f, b, w, c))


def bubble(name: str, p: int, m: int, f: float, b: float, w: float, c: float = 0.0) -> float:
    return run(name, p, m, f, b, w, c).longest_stage_time - m * chunks_of(name) * (f + b + w)


@pytest.mark.parametrize(
    "row", ROWS["published"], ids=lambda row: f"{row['schedule']}-{row['p']}-{row['m']}-{row['comm']}"
)
def test_published_rows(row: dict[str, Any]) -> None:
    p, m, c = row["p"], row["m"], row["comm"]
    if isinstance(row["F"], list):
        costs = StageCosts(
            forward=tuple(row["F"]), input_gradient=tuple(row["B"]), weight_gradient=tuple(row["W"]), delay=c
        )
        found = simulate(named_schedule(row["schedule"], p, m), costs)
    else:
        found = run(row["schedule"], p, m, row["F"], row["B"], row["W"], c)
        assert list(found.peak_memory) == row["peak_mem"]
    assert found.makespan == pytest.approx(row["makespan"], rel=1e-12)
    assert found.longest_stage_time == pytest.approx(row["longest_stage_time"], rel=1e-12)


@pytest.mark.parametrize("cases", CASES)
def test_gpipe_and_1f1b(cases: int) -> None:
    rng = random.Random(1)
    for _ in range(cases):
        p, m = rng.randint(2, 8), rng.randint(1, 24)
        f, b, w = (float(rng.randint(1, 60)) for _ in range(3))
        assert bubble("gpipe", p, m, f, b, w) == (p - 1) * (f + b + w)
        assert bubble("1f1b", p, m, f, b, w) == (p - 1) * (f + b + w)
        assert run("gpipe", p, m, f, b, w).peak_memory == (2.0 * m,) * p
        assert run("1f1b", p, m, f, b, w).peak_memory == tuple(2.0 * min(m, p - r) for r in range(p))


@pytest.mark.parametrize("cases", CASES)
def test_1f1b_with_a_delay(cases: int) -> None:
    # Fitted where the times are 20 to 60 and the delay at most 3.
    rng = random.Random(2)
    for _ in range(cases):
        p = rng.randint(2, 8)
        m = p * rng.randint(1, 4)
        f, b, w = (float(rng.randint(20, 60)), float(rng.randint(20, 60)), 0.0)
        c = float(rng.randint(1, 3))
        assert bubble("1f1b", p, m, f, b, w, c) == (p - 1) * (f + b + w) + c * (2 * (p - 1) * m // p + 2 * (p - 2))


@pytest.mark.parametrize("cases", CASES)
def test_interleaved(cases: int) -> None:
    rng = random.Random(3)
    for _ in range(cases):
        p, v = rng.randint(2, 8), rng.randint(2, 4)
        m = p * rng.randint(1, 3)
        f, b, w = (float(rng.randint(1, 60)) for _ in range(3))
        found = run(f"interleaved:{v}", p, m, f, b, w)
        assert found.makespan == (p - 1) * (f + b + w) + m * v * (f + b + w)
        if v == 2:
            assert found.peak_memory[0] == 2.0 * min(2 * m, 3 * p - 1)


@pytest.mark.parametrize("cases", CASES)
def test_zero_bubble_h1_and_h2(cases: int) -> None:
    rng = random.Random(4)
    for _ in range(cases):
        p = rng.randint(2, 8)
        m = rng.randint(2 * p, 3 * p)
        f, b = (float(rng.randint(20, 60)) for _ in range(2))
        w = float(rng.randint(1, int(min(f, b))))
        c = float(rng.randint(0, 3))
        found = run("zb-h1", p, m, f, b, w, c)
        assert found.longest_stage_time - m * (f + b + w) == (p - 1) * (f + b - w) + 4 * (p - 1) * c
        assert found.peak_memory == tuple(2.0 * p - r for r in range(p))
        assert run("zb-h2", p, m, f, b, w).peak_memory[0] == 2 * (2 * p - 1)
    for p in range(2, 9):
        assert bubble("zb-h2", p, 3 * p, 1.0, 1.0, 1.0) == 0
        assert bubble("zb-h2", p, 3 * p, 5.0, 6.0, 4.0) == (p - 1) * 3


@pytest.mark.parametrize("p", range(3, 9))
def test_v_schedules(p: int) -> None:
    for m in (2 * p, 2 * p + 3):
        half, least = run("v-half", p, m, 1, 1, 1), run("v-min", p, m, 1, 1, 1)
        assert half.longest_stage_time - 6 * m == (3 * p - 4 if p % 2 else 3 * p - 7)
        assert least.longest_stage_time - 6 * m == (4 * p - 5 if p % 3 else 4 * p - 7)
        assert max(half.peak_memory) == 4 * ((p + 2) // 2)
        assert max(least.peak_memory) == 4 * ((p + 4) // 3)
        assert bubble("zb-v", p, m, 1, 1, 1) == 0
        assert max(run("zb-v", p, m, 1, 1, 1).peak_memory) == 4 * p
    assert bubble("zb-v", p, p, 1, 1, 1) == p - 1


@pytest.mark.parametrize("p", range(2, 9))
def test_dual_pipe_v(p: int) -> None:
    for m in (2 * p, 2 * p + 3):
        found = run("dualpipev", p, m, 1, 1, 1)
        # Memory 2 p + 1 chunks; F and B of a pair one after the other, not as one.
        assert found.peak_memory == (2.0 * (2 * p + 1),) * p
        assert found.longest_stage_time - 6 * m == p - 1
    with pytest.raises(RequestError, match="twice the ranks"):
        named_schedule("dualpipev", p, 2 * p - 1)


@pytest.mark.parametrize("cases", [3, pytest.param(1000, marks=pytest.mark.slow)])
def test_v_schedules_of_any_size(cases: int) -> None:
    # F = B = W, in slots of that time.
    rng = random.Random(5)
    for _ in range(cases):
        p = rng.randint(3, 7)
        m, slot = rng.randint(2 * p, 3 * p), float(rng.randint(1, 60))
        costs = (slot, slot, slot)
        assert bubble("zb-v", p, m, *costs) == 0
        assert bubble("zb-v", p, p, *costs) == (p - 1) * slot
        assert bubble("v-half", p, m, *costs) == (3 * p - 4 if p % 2 else 3 * p - 7) * slot
        assert bubble("v-min", p, m, *costs) == (4 * p - 5 if p % 3 else 4 * p - 7) * slot
        assert bubble("dualpipev", p, m, *costs) == (p - 1) * slot


@pytest.mark.parametrize("cases", CASES)
def test_looped_bfs_of_any_size(cases: int) -> None:
    rng = random.Random(6)
    for _ in range(cases):
        p, v = rng.randint(2, 8), rng.randint(1, 4)
        m = rng.randint(p, 3 * p)
        f, b, w = (float(rng.randint(1, 60)) for _ in range(3))
        assert bubble(f"looped-bfs:{v}", p, m, f, b, w) == (p - 1) * (f + b + w)


@pytest.mark.parametrize("p", [2, 4])
def test_looped_bfs_is_gpipe_with_smaller_steps(p: int) -> None:
    for v in (1, 2, 3):
        assert bubble(f"looped-bfs:{v}", p, 2 * p, 3, 4, 2) == (p - 1) * 9


def test_names() -> None:
    for name in SCHEDULE_NAMES:
        named_schedule(name.replace(":V", ":2"), 4, 8).check()
    for wrong in ("", "zb", "1f1b:2", "interleaved", "interleaved:0", "zb-v:3"):
        with pytest.raises(RequestError, match="'schedule' must be one of"):
            chunks_of(wrong)
    with pytest.raises(RequestError, match="multiple of the 4 ranks"):
        named_schedule("interleaved:2", 4, 6)

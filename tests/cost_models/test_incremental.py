"""The compiled, incremental evaluation against the simulator, move by move."""

from __future__ import annotations

import random
import time

import pytest

from meshwright.cost_models.pipeline import StageCosts, simulate
from meshwright.cost_models.pipeline.incremental import Incremental
from meshwright.planner.zoo import named_schedule
from meshwright.plans import RequestError


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved:2", "dualpipev"])
def test_moves_give_what_a_new_simulation_gives(name: str) -> None:
    rng = random.Random(name)
    schedule = named_schedule(name, 3, 6)
    costs = StageCosts(
        forward=tuple(float(rng.randint(1, 9)) for _ in range(schedule.stages)),
        input_gradient=tuple(float(rng.randint(1, 9)) for _ in range(schedule.stages)),
        weight_gradient=tuple(float(rng.randint(1, 9)) for _ in range(schedule.stages)),
        delay=0.5,
    )
    running = Incremental(schedule, costs)
    assert running.makespan == simulate(schedule, costs).makespan
    moved = 0
    for _ in range(60):
        rank = rng.randrange(3)
        count = len(running.schedule.actions[rank])
        source = rng.randrange(count)
        before = running.makespan
        if running.move(rank, source, min(count - 1, max(0, source + rng.randint(-4, 4)))):
            moved += 1
        else:
            assert running.makespan == before
        assert running.makespan == simulate(running.schedule, costs).makespan
    assert moved > 5


def test_moves_outside_a_rank_are_refused() -> None:
    running = Incremental(named_schedule("1f1b", 2, 2), StageCosts.equal(2, 1.0, 1.0, 1.0))
    with pytest.raises(RequestError, match="within the order of rank 1"):
        running.move(1, 0, 4)


def test_twelve_thousand_actions_take_milliseconds() -> None:
    schedule = named_schedule("interleaved:4", 16, 64)
    rows = []
    for row in schedule.actions:
        parts = [
            type(action)(action.stage, kind, action.microbatch)
            for action in row
            for kind in (("I", "W") if action.kind == "B" else ("F",))
        ]
        rows.append(tuple(parts))
    schedule = type(schedule)(microbatches=64, placement=schedule.placement, actions=tuple(rows))
    assert sum(map(len, schedule.actions)) == 12_288
    running = Incremental(schedule, StageCosts.equal(64, 1.0, 1.0, 1.0))
    whole = min(_seconds(lambda: running._evaluate(0)) for _ in range(5))
    place = next(i for i, action in enumerate(schedule.actions[0]) if i >= 700 and action.kind == "W")
    late = min(_seconds(lambda: running.move(0, place, place + 1)) for _ in range(6))
    assert whole < 0.01
    assert late < whole / 2


def _seconds(call: object) -> float:
    begin = time.perf_counter()
    assert callable(call)
    call()
    return time.perf_counter() - begin

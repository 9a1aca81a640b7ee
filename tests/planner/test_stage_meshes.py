"""Pipeline ranks with different meshes: what crosses between them is right, and a plan file says it."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from meshwright.planner.api import plan
from meshwright.planner.checking.check import CheckReport
from meshwright.planner.checking.verify import check
from meshwright.plans import Plan, PlanError, ReplayError, RequestError, facts_of
from meshwright.plans.handover import handed_over
from meshwright.plans.meshes import Mesh
from meshwright.specs import load_spec

from ..pipelines import Tied, Twisted, batch_of, mixed, random_schedule
from .test_pipeline_runs import checked, model_of

SHAPES = {2: ["2", "1x2", "2x1"], 4: ["4", "2x2", "4x1"]}


def drawn(seed: int) -> tuple[Any, tuple, Plan, Any]:
    """A small model and a random pipeline of it; every third one has a rank of another size."""
    rng = random.Random(seed)
    model = model_of(rng.choice([Twisted, Tied]))
    args = batch_of(model, 4)
    ranks, size = rng.randint(2, 3), rng.choice([2, 4])
    meshes = [rng.choice(SHAPES[size]) for _ in range(ranks)]
    if seed % 3 == 2:
        meshes[rng.randrange(ranks)] = rng.choice(["1", "2", "3"])
    schedule = random_schedule(rng.randint(ranks, 5), ranks, rng.choice([1, 2, 4]), rng)
    mode = rng.choice(["none", "pointwise", "block"])
    found, captured = mixed(model, args, meshes=meshes, schedule=schedule, seed=seed, recompute=mode)
    return model, args, found, captured


def trial(seed: int) -> CheckReport:
    model, args, found, captured = drawn(seed)
    return checked(model, args, Plan.from_bytes(found.to_bytes()), captured)


def test_ranks_of_different_meshes_equal_one_process() -> None:
    report = trial(8)  # three meshes: 1, 4 and 4x1
    assert report.equal and report.compared > 10, report


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(8), *range(9, 32)])
def test_more_ranks_of_different_meshes(seed: int) -> None:
    report = trial(seed)
    assert report.equal and report.compared > 10, report


def test_every_device_is_given_exactly_its_piece() -> None:
    """From four in a row to two by two: each of the new devices gets its elements once, from those that have them."""
    before, after = (("S(0)",), Mesh.of((4,))), (("S(1)", "R"), Mesh.of((2, 2)))
    parts = handed_over((6, 5), "float32", before, after)
    for taker in range(4):
        got = sorted(
            (r, c)
            for one in parts
            if one.taker == taker
            for r in range(one.box[0][0], sum(one.box[0]))
            for c in range(one.box[1][0], sum(one.box[1]))
        )
        columns = range(3) if taker < 2 else range(3, 5)
        assert got == [(r, c) for r in range(6) for c in columns]
    assert all(one.box[0][0] // 2 == one.giver for one in parts)


def test_the_file_says_which_meshes_and_ways() -> None:
    _, _, found, _ = drawn(8)
    tree = json.loads(found.to_bytes())
    assert tree["version"] == 2 and len(tree["stage_meshes"]["shardings"]) == 2
    assert "on rank" in found.summary() and "Between meshes" in found.summary()
    value = found.stage_meshes.crossings[0].value  # type: ignore[union-attr]
    assert [fact.kind for fact in facts_of(found, [value])][-1] == "crossing"
    for change, message in (
        ({"version": 1}, "version"),
        ({"stage_meshes": {**tree["stage_meshes"], "shardings": []}}, "shardings"),
        ({"pipeline": None}, "stage_meshes"),
        ({"unheard": 1}, "unheard"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan.from_bytes(json.dumps(tree | change).encode())
    crossing = {**tree["stage_meshes"]["crossings"][0], "landed": ["P(sum)"]}
    with pytest.raises(PlanError, match="no pending reduction"):
        meshes = {**tree["stage_meshes"], "crossings": [crossing]}
        Plan.from_bytes(json.dumps(tree | {"stage_meshes": meshes}).encode())


def test_a_way_that_is_missing_is_named() -> None:
    model, args, found, captured = drawn(8)
    assert found.stage_meshes
    meshes = msgspec.structs.replace(found.stage_meshes, crossings=found.stage_meshes.crossings[1:])
    with pytest.raises(ReplayError, match="no way for .* from stage"):
        checked(model, args, msgspec.structs.replace(found, stage_meshes=meshes), captured)


def asked(mesh: Any, **options: Any) -> tuple[tuple, Plan]:
    spec = load_spec("llama-tiny", batch=16, layers=5)
    built = spec.build()
    return (*built, spec.loss), plan(
        *built, cluster="cpu:8", mesh=mesh, loss=spec.loss, pipeline=2, microbatches=4, time_limit_s=4.0, **options
    )


def test_what_is_refused() -> None:
    with pytest.raises(RequestError, match="one for each of 2, got 3"):
        asked("4/2x2/4")
    with pytest.raises(RequestError, match="equally many devices on each pipeline rank"):
        asked(["4", "2"])


@pytest.mark.slow
def test_a_mesh_for_each_rank_is_planned_and_right() -> None:
    """Deep enough that a block stands for others: ways go by the blocks' own numbers."""
    (model, args, kwargs, loss), found = asked("4/2x2", schedule="interleaved:2")
    assert [str(mesh) for mesh in found.meshes()] == ["4", "2x2"] and found.version == 2
    report = check(model, args, kwargs, plan=found, loss=loss)
    assert report.equal, report.differences

"""Costs that are not written out equal the matrices that they stand for, alone and in the search."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models.prices import Prices
from meshwright.planner.api import draft
from meshwright.planner.fitting import solve_within
from meshwright.planner.sharding import formulate as formulation
from meshwright.planner.sharding.transitions import Transitions, TransitionTable
from meshwright.planner.solver import reductions
from meshwright.planner.solver import search as solver
from meshwright.planner.solver.problem import evaluate
from meshwright.planner.solver.ways import Moved, Way
from meshwright.plans.clusters import Cluster
from meshwright.plans.meshes import Mesh
from meshwright.specs import load_spec


def _table(mesh: str, shape: tuple[int, ...]) -> TransitionTable:
    grid = Mesh.parse(mesh)
    cluster = Cluster.parse(f"h100-sxm:{grid.size // 2}x2")
    return Transitions(grid, Prices.of(cluster, grid, compiled=True)).table(shape, 2)


@pytest.mark.parametrize(("mesh", "shape"), [("2x2", (8, 6, 4)), ("2x2x2", (8, 16, 64)), ("2x1x3", (5, 12))])
def test_a_way_is_its_matrix(mesh: str, shape: tuple[int, ...]) -> None:
    table = _table(mesh, shape)
    rng = np.random.default_rng(0)
    count = len(table.layouts)
    way = Way(table=table, rows=rng.integers(0, count, 7), columns=rng.integers(0, count, 9), weight=3.0)
    matrix = table.seconds[np.ix_(way.rows, way.columns)] * 3.0
    line, other = rng.random(7) * 1e-4, rng.random(9) * 1e-4
    for found, want in (
        (np.asarray(way), matrix),
        (np.asarray(way.T), matrix.T),
        (np.asarray(way.restricted(np.array([1, 4]), np.array([0, 8]))), matrix[np.ix_([1, 4], [0, 8])]),
        (way.least(line), (line[:, None] + matrix).min(axis=0)),
        (way.T.least(other), (other[None, :] + matrix).min(axis=1)),
        (way[3], matrix[3]),
        (way[3, 5], matrix[3, 5]),
    ):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-15)
    assert way.most >= matrix.max()


def test_a_single_way_is_found_without_all_pairs() -> None:
    one, other = (_table("2x2x2", (8, 16, 64)) for _ in range(2))
    assert one.seconds.shape == (len(one.layouts),) * 2
    for start in one.layouts[::17]:
        for end in one.layouts[::13]:
            assert other.time(start, end) == pytest.approx(one.time(start, end), abs=1e-15)
            assert other.way(start, end) == one.way(start, end)


def test_bytes_of_a_copy() -> None:
    moved = Moved(rows=np.array([0, 2]), columns=np.array([2, 1, 0]), bytes=np.array([5.0, 6.0, 7.0]))
    flipped = Moved(rows=moved.rows, columns=moved.columns, bytes=moved.bytes, flipped=True)
    assert np.asarray(moved).tolist() == [[5.0, 6.0, 0.0], [0.0, 6.0, 7.0]]
    assert (np.asarray(flipped) == np.asarray(moved).T).all()
    assert [[moved[i, j] for j in range(3)] for i in range(2)] == np.asarray(moved).tolist()
    assert flipped[2, 1] == moved[1, 2]


@pytest.mark.parametrize("share", [None, pytest.param(0.7, marks=pytest.mark.slow)])
def test_the_search_finds_the_same_plan_without_matrices(share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that may be a way is one, and messages come first: the optimum is that of the matrices, and within
    limits the bound holds for it and the plan is near it."""
    model, args, kwargs = load_spec("llama-tiny").build()
    request = {"cluster": "h100-sxm:2x2", "mesh": "2x2", "optimizer": "none"}
    free = draft(model, args, kwargs, **request)
    limit = None
    if share is not None:
        limit = int(share * free.timeline.profile(solve_within(free).choices).max())
    written = draft(model, args, kwargs, **request, memory_limit_bytes=limit)
    want = solve_within(written, gap=1e-6)
    for room in (formulation, reductions):
        monkeypatch.setattr(room, "WRITTEN_OUT", 0)
    monkeypatch.setattr(solver, "_QUICK", 0.0)
    unwritten = draft(model, args, kwargs, **request, memory_limit_bytes=limit)
    edges = unwritten.formulation.problem.edges
    assert any(isinstance(costs, Way) for costs in edges.values())
    assert evaluate(unwritten.formulation.problem, want.choices) == pytest.approx(want.objective_s)
    found = solve_within(unwritten, gap=1e-6)
    assert found.bound_s <= want.objective_s * (1 + 1e-6)
    assert want.objective_s <= found.objective_s * (1 + 1e-6)
    assert found.objective_s <= want.objective_s * (1 + 1e-5 if share is None else 1.02)

"""The planner's search against brute force, on problems small enough to try every plan."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.solver import program
from meshwright.planner.solver.problem import (
    Overlap,
    Problem,
    Row,
    Solution,
    brute_force,
    evaluate,
    row_value,
    within_rows,
)
from meshwright.planner.solver.sampling import sample
from meshwright.planner.solver.search import solve
from meshwright.plans.errors import Infeasible

KINDS = [(False, False), (True, False), (False, True), (True, True)]


def _costs(rng: np.random.Generator, shape: tuple[int, ...], forbidden: float) -> np.ndarray:
    costs = rng.random(shape) * 10.0 ** rng.integers(-6, -1)
    costs[rng.random(shape) < forbidden] = math.inf
    return costs


def _term(
    rng: np.random.Generator, sizes: list[int], pairs: list[tuple[int, int]], low: float, scale: float
) -> tuple[dict[int, np.ndarray], dict[tuple[int, int], np.ndarray]]:
    nodes = {i: np.round((low + rng.random(n)) * scale, 9) for i, n in enumerate(sizes) if rng.random() < 0.7}
    taken = [pair for pair in pairs if rng.random() < 0.4]
    # Now and then a row couples nodes that no cost couples.
    if rng.random() < 0.1 and (0, len(sizes) - 1) not in taken:
        taken.append((0, len(sizes) - 1))
    return nodes, {(i, j): np.round((low + rng.random((sizes[i], sizes[j]))) * scale, 9) for i, j in taken}


def _random_problem(seed: int, *, rows: bool, overlaps: bool) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 5, int(rng.integers(3, 9)))]
    pairs = [(i, j) for i in range(len(sizes)) for j in range(i + 1, len(sizes)) if rng.random() < 0.4]
    limits: list[Row] = []
    for k in range(int(rng.integers(1, 4)) if rows else 0):
        lines, matrices = _term(rng, sizes, pairs, 0.0, 1e10)
        values = [*lines.values(), *matrices.values()]
        least, most = sum(float(v.min()) for v in values), sum(float(v.max()) for v in values)
        limit = least + (most - least) * float(rng.choice([0.1, 0.25, 0.4, 0.6]))
        limits.append(Row(name=f"peak {k}", limit=limit, nodes=lines, edges=matrices))
    hidden: list[Overlap] = []
    for _ in range(int(rng.integers(1, 4)) if overlaps else 0):
        lines, matrices = _term(rng, sizes, pairs, -0.5, 10.0 ** float(rng.integers(-5, -1)))
        hidden.append(Overlap(constant=float(rng.normal()) * 1e-3, nodes=lines, edges=matrices))
    return Problem(
        names=tuple(f"n{i}" for i in range(len(sizes))),
        nodes=tuple(_costs(rng, (n,), 0.15) for n in sizes),
        edges={(i, j): _costs(rng, (sizes[i], sizes[j]), float(rng.choice([0.0, 0.1, 0.4]))) for i, j in pairs},
        rows=tuple(limits),
        overlaps=tuple(hidden),
    )


def _try(problem: Problem, solver: str = "highs") -> Solution | None:
    try:
        return solve(problem, gap=1e-9, solver=solver)
    except Infeasible:
        return None


def _assert_best(problem: Problem, solver: str = "highs") -> bool:
    """Whether there is a plan; if so the search found a best one and proved it."""
    found = _try(problem, solver)
    try:
        best = brute_force(problem)
    except Infeasible:
        assert found is None
        return False
    assert found is not None
    assert found.objective_s == evaluate(problem, found.choices)
    assert within_rows(problem, found.choices)
    assert found.objective_s == pytest.approx(best.objective_s, rel=1e-8, abs=1e-15)
    assert found.bound_s <= best.objective_s * (1 + 1e-9) + 1e-15
    assert found.status == "optimal"
    assert found.gap == max(0.0, found.objective_s - found.bound_s) / max(abs(found.objective_s), 1e-30)
    return True


@pytest.mark.parametrize(("rows", "overlaps"), KINDS)
def test_best_plan_as_by_brute_force(rows: bool, overlaps: bool) -> None:
    feasible = [_assert_best(_random_problem(seed, rows=rows, overlaps=overlaps)) for seed in range(70)]
    assert any(feasible) and not all(feasible)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(1000, 10**9), kind=st.sampled_from(KINDS))
def test_best_plan_on_any_problem(seed: int, kind: tuple[bool, bool]) -> None:
    _assert_best(_random_problem(seed, rows=kind[0], overlaps=kind[1]))


def test_cbc_finds_the_same() -> None:
    for seed in range(8):
        _assert_best(_random_problem(seed, rows=True, overlaps=True), solver="cbc")


def test_program_alone_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays straight to HiGHS, as for programs too large for PuLP."""
    monkeypatch.setattr(program, "_DIRECT", 0)
    for seed in range(12):
        _assert_best(_random_problem(seed, rows=True, overlaps=True))


def _two(limit: float) -> Problem:
    return Problem(
        names=("a", "b"),
        nodes=(np.array([1.0, 2.0]), np.array([1.0, 2.0])),
        edges={(0, 1): np.zeros((2, 2))},
        rows=(
            Row(name="loose", limit=1e12, nodes={0: np.array([1.0, 2.0])}),
            Row(name="bytes alive at op 7", limit=limit, nodes={0: np.array([8e9, 5e9]), 1: np.array([8e9, 6e9])}),
        ),
    )


def test_limit_is_met_exactly() -> None:
    assert solve(_two(11e9)).choices == (1, 1)
    assert solve(_two(13e9)).objective_s == 3.0
    assert solve(_two(16e9)).choices == (0, 0)


def test_infeasible_names_the_row_and_by_how_much() -> None:
    with pytest.raises(Infeasible, match=r"'bytes alive at op 7'.* 1e\+10, got 1\.1e\+10 at least, 1e\+09 too much"):
        solve(_two(10e9))


def test_rows_that_fail_only_together_are_infeasible() -> None:
    problem = replace(
        _two(20e9),
        rows=(
            Row(name="first", limit=5.0, nodes={0: np.array([2.0, 8.0]), 1: np.array([2.0, 8.0])}),
            Row(name="second", limit=5.0, nodes={0: np.array([8.0, 2.0]), 1: np.array([8.0, 2.0])}),
        ),
    )
    with pytest.raises(Infeasible, match=r"'(first|second)' must stay at or under 5"):
        solve(problem)


def test_infeasible_names_the_node_or_pair() -> None:
    forbidden = np.full(2, math.inf)
    with pytest.raises(Infeasible, match="'b' must have a choice"):
        solve(Problem(names=("a", "b"), nodes=(np.zeros(2), forbidden), edges={}))
    with pytest.raises(Infeasible, match="'a' and 'b' must have a pair"):
        solve(Problem(names=("a", "b"), nodes=(np.zeros(2), np.zeros(2)), edges={(0, 1): np.full((2, 2), math.inf)}))


def test_infeasible_odd_cycle_names_nodes() -> None:
    """Every node and pair has partners, yet no plan exists: two colours on a triangle."""
    differ = np.array([[math.inf, 0.0], [0.0, math.inf]])
    edges = {(0, 1): differ, (0, 2): differ, (1, 2): differ}
    with pytest.raises(Infeasible):
        solve(Problem(names=("a", "b", "c"), nodes=(np.zeros(2),) * 3, edges=edges))


def test_warm_plan_is_kept_when_nothing_is_better() -> None:
    problem = _two(16e9)
    assert solve(problem, warm=[(0, 0)]).objective_s == 2.0
    assert solve(problem, warm=[(1, 1)]).objective_s == 2.0


def test_damaged_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per pair"):
        Problem(names=("a", "b"), nodes=(np.zeros(2), np.zeros(2)), edges={(1, 0): np.zeros((2, 2))})
    with pytest.raises(ValueError, match="nan"):
        Problem(names=("a",), nodes=(np.array([math.nan]),), edges={})
    with pytest.raises(ValueError, match="'solver' must be"):
        solve(_two(16e9), solver="gurobi")


def _blocks(count: int, choices: int, seed: int, *, tight: bool, hides: bool) -> Problem:
    """Transformer-shaped: q, k, v and output products with weights, two residual additions, a two-product tail."""
    rng = np.random.default_rng(seed)
    kinds: list[str] = ["x"]
    pairs: list[tuple[int, int]] = []

    def node(kind: str, *sources: int) -> int:
        kinds.append(kind)
        pairs.extend((source, len(kinds) - 1) for source in sources)
        return len(kinds) - 1

    stream = 0
    while len(kinds) < count:
        norm = node("view", stream)
        heads = [node("view", node("product", norm, node("weight"))) for _ in range(3)]
        middle = node("sum", stream, node("product", node("attend", *heads), node("weight")))
        wide = node("view", node("product", node("view", middle), node("weight")))
        stream = node("sum", middle, node("product", wide, node("weight")))
    scale = {"product": 1e-3, "view": 1e-4}
    nodes = tuple(np.round(rng.random(choices) * 8) / 8 * scale.get(kind, 2e-4) for kind in kinds)
    edges: dict[tuple[int, int], np.ndarray] = {}
    for i, j in pairs:
        matrix = rng.random((choices, choices)) * 1e-3
        if kinds[j] == "view":
            matrix[rng.random(matrix.shape) < 0.5] = math.inf
        matrix[np.arange(choices), rng.permutation(choices)] = 0.0
        edges[i, j] = matrix
    weights = [i for i, kind in enumerate(kinds) if kind == "weight"]
    sizes = {i: np.round(1e9 * 2.0 ** -rng.integers(0, 7, choices)) for i in weights}
    least, mean = sum(float(v.min()) for v in sizes.values()), sum(float(v.mean()) for v in sizes.values())
    moved = {i: rng.random(choices) * 1e-3 if i in sizes else -costs for i, costs in enumerate(nodes)}
    return Problem(
        names=tuple(f"{kind}{i}" for i, kind in enumerate(kinds)),
        nodes=nodes,
        edges=edges,
        rows=(Row(name="bytes", limit=least + 0.35 * (mean - least), nodes=sizes),) if tight else (),
        overlaps=(Overlap(constant=0.0, nodes=moved),) if hides else (),
    )


@pytest.mark.parametrize(("tight", "hides"), KINDS)
def test_transformer_sized_problem(tight: bool, hides: bool) -> None:
    problem = _blocks(300, 25, 1, tight=tight, hides=hides)
    found = solve(problem, gap=1e-3)
    assert found.gap <= 1e-3
    assert found.status == "optimal"
    assert within_rows(problem, found.choices)
    assert found.objective_s == evaluate(problem, found.choices)


def test_split_nodes_still_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tables would be too large the bound is looser, the answer the same."""
    from meshwright.planner.solver import search as solver

    monkeypatch.setattr(solver, "_TABLE", 8.0)
    for seed in range(40):
        rows, overlaps = KINDS[seed % 4]
        _assert_best(_random_problem(seed, rows=rows, overlaps=overlaps))


def test_messages_first_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.planner.solver import search as solver

    monkeypatch.setattr(solver, "_QUICK", 0.0)
    for seed in range(40):
        rows, overlaps = KINDS[seed % 4]
        _assert_best(_random_problem(seed, rows=rows, overlaps=overlaps))


def test_ctrl_c_returns_the_best_so_far() -> None:
    problem = _blocks(120, 12, 2, tight=True, hides=True)

    def stop(stage: str, objective: float, bound: float) -> None:
        if math.isfinite(objective):
            raise KeyboardInterrupt

    found = solve(problem, on_progress=stop)
    assert found.status == "interrupted"
    assert within_rows(problem, found.choices)
    assert found.bound_s <= solve(problem).objective_s <= found.objective_s


def test_ctrl_c_without_a_plan_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.planner.solver import search as solver

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(solver, "clean", stop)
    with pytest.raises(KeyboardInterrupt):
        solve(_two(16e9))


def test_progress_only_improves() -> None:
    seen: list[tuple[float, float]] = []
    solve(_blocks(80, 8, 3, tight=True, hides=True), on_progress=lambda stage, up, low: seen.append((up, low)))
    assert seen == sorted(seen, key=lambda pair: -pair[0])
    assert [low for _, low in seen] == sorted(low for _, low in seen)
    assert all(low <= up for up, low in seen)


def test_samples_are_feasible_and_varied() -> None:
    for seed in range(60):
        problem = _random_problem(seed, rows=seed % 2 == 1, overlaps=False)
        try:
            brute_force(problem)
        except Infeasible:
            with pytest.raises(Infeasible):
                sample(problem, random.Random(seed), tries=20)
            continue
        plan = sample(problem, random.Random(seed))
        assert math.isfinite(evaluate(problem, plan))
        assert all(row_value(row, plan) <= row.limit for row in problem.rows)
    wide = _blocks(60, 8, 4, tight=True, hides=False)
    plans = [sample(wide, random.Random(seed)) for seed in range(40)]
    assert all(within_rows(wide, plan) and math.isfinite(evaluate(wide, plan)) for plan in plans)
    assert np.mean([len({plan[node] for plan in plans}) for node in range(len(wide.nodes))]) >= 5

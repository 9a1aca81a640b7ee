"""Why nothing fits: which limit binds and by how much."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...plans.errors import Infeasible
from .elimination import eliminate, order
from .problem import Pair, Problem, Row, row_value
from .program import build, run

__all__ = ["blame"]

_TABLE = 3e7


def blame(problem: Problem, limits: Mapping[str, float], solver: str, deadline: float) -> tuple[int, ...] | None:
    """Raise Infeasible when that can be proven, with the reason; else a plan that meets the rows, if one was met.

    `limits` are those of the original rows: folding moves what is settled from a row's coefficients to its limit.
    """
    _blame_pairs(problem)
    for row in problem.rows:
        least = _least(problem, row)
        # Sums of large coefficients round; a row that is over by less is left to the program.
        if least > row.limit + 1e-9 * abs(row.limit):
            raise Infeasible(_message(row, least, limits) + ": no plan needs less")
    if max(problem.sizes, default=1) == 1:
        return None
    program = build(problem, 1.0, elastic=True)
    outcome = run(program.matrix, solver=solver, time_limit_s=max(1.0, deadline - time.perf_counter()), gap=1e-6)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.values is None:
        return None
    plan = program.plan(outcome.values)
    if outcome.bound <= 1e-6 or not problem.rows:
        return plan
    row = max(problem.rows, key=lambda row: (row_value(row, plan) - row.limit) / _unit(row))
    raise Infeasible(
        _message(row, row_value(row, plan), limits) + ", in the plan that comes nearest to meeting every limit at once"
    )


def _unit(row: Row) -> float:
    return max((float(np.ptp(v)) for v in (*row.nodes.values(), *row.edges.values())), default=1.0) or 1.0


def _message(row: Row, least: float, limits: Mapping[str, float]) -> str:
    limit = limits.get(row.name, row.limit)
    over = least - row.limit
    return f"'{row.name}' must stay at or under {limit:.6g}, got {limit + over:.6g} at least, {over:.6g} too much"


def _least(problem: Problem, row: Row) -> float:
    """Least attainable value of a row by any allowed plan, or a bound on it where tables would be too large."""
    nodes = [row.nodes.get(i, np.zeros(size)) for i, size in enumerate(problem.sizes)]
    return _bound(problem, nodes, {pair: row.edges.get(pair) for pair in problem.edges})


def _bound(problem: Problem, nodes: list[np.ndarray], extra: dict[Pair, np.ndarray | None]) -> float:
    edges: dict[Pair, np.ndarray] = {}
    for pair, matrix in problem.edges.items():
        added = extra[pair]
        edges[pair] = np.where(np.isfinite(matrix), 0.0 if added is None else added, math.inf)
    return eliminate(order(problem.sizes, problem.edges, cap=_TABLE), nodes, edges).bound


def _blame_pairs(problem: Problem) -> None:
    """Name the nodes whose choices cannot be made to fit each other, rows aside."""
    bare = replace(problem, rows=(), overlaps=())
    steps = order(bare.sizes, bare.edges, cap=_TABLE)
    edges = {pair: np.where(np.isfinite(matrix), 0.0, math.inf) for pair, matrix in bare.edges.items()}
    tables = eliminate(steps, [np.zeros(size) for size in bare.sizes], edges)
    for step, message in zip(steps, tables.messages, strict=True):
        if np.isinf(message).all():
            names = ", ".join(f"'{problem.names[node]}'" for node in sorted((step.node, *step.scope)))
            raise Infeasible(f"{names} must have choices that fit together, got none; every mix is forbidden")

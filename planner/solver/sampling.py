"""Random feasible plans, spread widely: what the tests of the rest of the system run on."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np

from ...plans.errors import Infeasible
from .elimination import Tables, eliminate, lines, order
from .problem import Problem, evaluate, row_value
from .reductions import complete, consistent, restrict
from .search import solve

__all__ = ["sample"]

_TABLE = 1 << 22


def sample(problem: Problem, rng: random.Random, tries: int = 200) -> tuple[int, ...]:
    """A random plan that is allowed and meets every row; cost plays no part.

    Choices are drawn from tables of what can still be completed. Each try that is over a row makes the rows' own
    coefficients count for more; when no try fits, random costs and the exact search settle it.
    """
    full = complete(problem)
    small, lift = restrict(full, consistent(full))
    if max(small.sizes, default=1) == 1:
        return lift((0,) * len(small.nodes))
    edges = {pair: np.where(np.isfinite(matrix), 0.0, math.inf) for pair, matrix in small.edges.items()}
    steps = order(small.sizes, edges, cap=_TABLE)
    tables = eliminate(steps, [np.zeros(size) for size in small.sizes], edges)
    weight = {row.name: 0.0 for row in small.rows}
    for _ in range(tries):
        if any(weight.values()):
            tables = _pressed(small, tables, weight, rng)
        plan = lift(_draw(tables, len(small.nodes), rng))
        over = [row.name for row in problem.rows if row_value(row, plan) > row.limit]
        if not over and math.isfinite(evaluate(problem, plan)):
            return plan
        for name in over:
            weight[name] = max(0.5, weight[name] * 1.5)
    noise = np.random.default_rng(rng.getrandbits(64))
    costs = tuple(np.where(np.isfinite(line), noise.random(len(line)), math.inf) for line in problem.nodes)
    flat = {pair: np.where(np.isfinite(matrix), 0.0, math.inf) for pair, matrix in problem.edges.items()}
    return solve(replace(problem, nodes=costs, edges=flat, overlaps=()), gap=0.5).choices


def _draw(tables: Tables, count: int, rng: random.Random) -> tuple[int, ...]:
    """Each node's choice at random among the cheapest: with costs of 0 and inf, among all that can be completed."""
    plan: dict[int, int] = {}
    for node, line in lines(tables, plan):
        least = line.min()
        if math.isinf(least):
            if all(step.parts == 1 for step in tables.steps):
                raise Infeasible("no mix of allowed choices fits together on every edge")
            plan[node] = 0
        else:
            plan[node] = int(rng.choice(np.flatnonzero(line <= least)))
    return tuple(plan[node] for node in range(count))


def _pressed(problem: Problem, tables: Tables, weight: dict[str, float], rng: random.Random) -> Tables:
    """Tables of random costs plus weighted rows, each row in units of its largest coefficient."""
    noise = np.random.default_rng(rng.getrandbits(64))
    nodes = [noise.random(size) for size in problem.sizes]
    edges = {pair: np.where(np.isfinite(matrix), 0.0, math.inf) for pair, matrix in problem.edges.items()}
    for row in problem.rows:
        spread = max((float(np.ptp(v)) for v in (*row.nodes.values(), *row.edges.values())), default=0.0)
        if weight[row.name] == 0.0 or spread == 0.0:
            continue
        for node, line in row.nodes.items():
            nodes[node] = nodes[node] + line * (weight[row.name] / spread)
        for pair, matrix in row.edges.items():
            edges[pair] = edges[pair] + matrix * (weight[row.name] / spread)
    return eliminate(tables.steps, nodes, edges)

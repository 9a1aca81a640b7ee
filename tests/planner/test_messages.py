"""Messages prove bounds that no plan is under, whatever sweeps were done; on trees and easy problems they are exact."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from meshwright.planner.solver.messages import Messages
from meshwright.planner.solver.problem import Problem, evaluate
from meshwright.planner.solver.reductions import complete, consistent, fold, restrict


def _random(seed: int, count: int, chance: float) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, count)
    edges = {}
    for i, j in itertools.combinations(range(count), 2):
        if j == i + 1 or rng.random() < chance:
            matrix = rng.random((sizes[i], sizes[j]))
            matrix[rng.random(matrix.shape) < 0.15] = math.inf
            matrix[0, 0] = 1.0
            edges[i, j] = matrix
    nodes = tuple(rng.random(size) for size in sizes)
    problem = complete(Problem(names=tuple(map(str, range(count))), nodes=nodes, edges=edges))
    return fold(restrict(problem, consistent(problem))[0])


def _climbed(problem: Problem, sweeps: int) -> Messages:
    messages = Messages.of(problem.nodes, problem.edges)
    messages.climb(
        sweeps=sweeps, deadline=math.inf, enough=lambda bound: False, least_gain=-1.0, rounded=lambda plan: None
    )
    return messages


def _plans(problem: Problem) -> list[tuple[tuple[int, ...], float]]:
    return [(plan, evaluate(problem, plan)) for plan in itertools.product(*(range(size) for size in problem.sizes))]


@pytest.mark.parametrize("seed", range(30))
def test_bounds_hold_for_every_plan(seed: int) -> None:
    problem = _random(seed, 6, 0.4)
    for sweeps in (1, 3, 30):
        messages = _climbed(problem, sweeps)
        found = messages.totals()
        bound, _, _ = messages.relaxed()
        assert bound == pytest.approx(found.bound, abs=1e-12)
        for plan, value in _plans(problem):
            assert found.bound <= value + 1e-12
            for node, least in found.nodes.items():
                assert least[plan[node]] <= value + 1e-12
            for (i, j), pair in ((pair, found.edges(pair)) for pair in problem.edges):
                assert pair[plan[i], plan[j]] <= value + 1e-12


def test_a_chain_is_solved_exactly() -> None:
    for seed in range(20):
        problem = _random(seed, 7, 0.0)
        messages = _climbed(problem, 1)
        best = min(value for _, value in _plans(problem))
        assert messages.totals().bound == pytest.approx(best, abs=1e-12)
        assert evaluate(problem, messages.rounded()) == pytest.approx(best, abs=1e-12)


def test_the_sweeps_bound_is_the_chains_bound() -> None:
    problem = _random(3, 8, 0.5)
    messages = Messages.of(problem.nodes, problem.edges)
    for _ in range(20):
        swept = messages.climb(
            sweeps=1, deadline=math.inf, enough=lambda bound: False, least_gain=-1.0, rounded=lambda plan: None
        )
        assert swept == pytest.approx(messages.totals().bound, abs=1e-12)


def test_relaxed_seats_have_the_bound_as_their_cost() -> None:
    """So their value of any row is a slope of the bound in that row's price."""
    for seed in range(20):
        problem = _random(seed, 7, 0.4)
        messages = _climbed(problem, 4)
        bound, seats, pairs = messages.relaxed()
        own = sum(share * problem.nodes[node][choice] for node, choice, share in seats)
        own += sum(float(line[0]) for line in problem.nodes if len(line) == 1)
        own += sum(float(problem.edges[pair][at]) for pair, at in pairs.items())
        told = sum(
            share * sum(messages.messages[other, node][choice] for other in _beside(messages, node))
            for node, choice, share in seats
        )
        for (i, j), (a, b) in pairs.items():
            told -= messages.messages[i, j][b] + messages.messages[j, i][a]
        assert own + told == pytest.approx(bound, abs=1e-9)
        # Each node's shares sum to one.
        for node in messages.order:
            assert sum(share for at, _, share in seats if at == node) == pytest.approx(1.0)


def _beside(messages: Messages, node: int) -> list[int]:
    return [*messages.earlier[node], *messages.later[node]]

"""Local search: one node at a time takes the choice that is best given all others, rows kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Overlap, Pair, Problem, Row

__all__ = ["Descent"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Descent:
    """A problem arranged by node: its edges, and what it adds to each term."""

    problem: Problem
    edges: list[list[tuple[np.ndarray, int]]]
    lines: list[list[tuple[int, np.ndarray]]]
    couplings: list[list[tuple[int, np.ndarray, int]]]
    limits: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> Descent:
        """Arrange a problem."""
        terms: tuple[Row | Overlap, ...] = (*problem.rows, *problem.overlaps)
        edges: list[list[tuple[np.ndarray, int]]] = [[] for _ in problem.nodes]
        lines: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.nodes]
        couplings: list[list[tuple[int, np.ndarray, int]]] = [[] for _ in problem.nodes]
        for (i, j), matrix in problem.edges.items():
            edges[i].append((np.ascontiguousarray(matrix.T), j))
            edges[j].append((matrix, i))
        for k, term in enumerate(terms):
            for i, line in term.nodes.items():
                lines[i].append((k, line))
            for (i, j), matrix in term.edges.items():
                couplings[i].append((k, matrix.T, j))
                couplings[j].append((k, matrix, i))
        limits = np.array([row.limit for row in problem.rows])
        return cls(problem=problem, edges=edges, lines=lines, couplings=couplings, limits=limits)

    def repair(self, plan: Sequence[int], prices: np.ndarray, rounds: int = 12) -> tuple[int, ...] | None:
        """A plan that meets every row, found from one that need not; None when growing fines do not lead to one.

        `prices` are the first fines in seconds per unit of a row.
        """
        fines = prices
        for _ in range(rounds):
            plan = self.improve(plan, 3, fines)
            if (self._totals(list(plan))[: len(self.limits)] <= self.limits).all():
                return plan
            fines = fines * 2.0
        return None

    def improve(self, plan: Sequence[int], sweeps: int = 8, fines: np.ndarray | None = None) -> tuple[int, ...]:
        """The plan after sweeps over all nodes, until nothing moves; never worse, rows never more over.

        With `fines`, seconds per unit of each row, rows may be over and pay.
        """
        chosen = list(plan)
        totals = self._totals(chosen)
        movable = [i for i, costs in enumerate(self.problem.nodes) if len(costs) > 1]
        for _ in range(sweeps):
            moved = False
            for node in movable:
                costs, change = self._options(node, chosen, totals, fines)
                choice = int(costs.argmin())
                here = chosen[node]
                least = costs[here] - 1e-12 * abs(costs[here]) if np.isfinite(costs[here]) else np.inf
                if costs[choice] < least:
                    totals += change[:, choice] - change[:, here]
                    chosen[node] = choice
                    moved = True
            if not moved:
                break
        return tuple(chosen)

    def _options(
        self, node: int, chosen: list[int], totals: np.ndarray, fines: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each choice of a node given the others, and its part of every term."""
        costs = self.problem.nodes[node].copy()
        for matrix, other in self.edges[node]:
            costs += matrix[chosen[other]]
        change = np.zeros((len(totals), len(costs)))
        for k, line in self.lines[node]:
            change[k] += line
        for k, matrix, other in self.couplings[node]:
            change[k] += matrix[chosen[other]]
        if len(totals):
            after = totals[:, None] + change - change[:, chosen[node], None]
            rows = len(self.limits)
            costs += np.maximum(after[rows:], 0.0).sum(axis=0)
            if fines is not None:
                return costs + fines @ np.maximum(after[:rows] - self.limits[:, None], 0.0), change
            over = np.any(after[:rows] > np.maximum(self.limits, totals[:rows])[:, None], axis=0)
            stays = np.arange(len(costs)) == chosen[node]
            costs = np.where(np.logical_and(over, ~stays), np.inf, costs)
        return costs, change

    def _totals(self, chosen: list[int]) -> np.ndarray:
        terms: tuple[Row | Overlap, ...] = (*self.problem.rows, *self.problem.overlaps)
        totals = np.zeros(len(terms))
        for k, term in enumerate(terms):
            pairs: dict[Pair, np.ndarray] = dict(term.edges)
            totals[k] = sum(float(line[chosen[i]]) for i, line in term.nodes.items())
            totals[k] += sum(float(matrix[chosen[i], chosen[j]]) for (i, j), matrix in pairs.items())
            totals[k] += term.constant if isinstance(term, Overlap) else 0.0
        return totals

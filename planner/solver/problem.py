"""The planner's problem as numbers: nodes with choices, costs on pairs, hard rows and hideable overlaps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...plans.errors import Infeasible

__all__ = [
    "Overlap",
    "Pair",
    "Problem",
    "Row",
    "Solution",
    "Stats",
    "brute_force",
    "evaluate",
    "overlap_value",
    "row_value",
    "within_rows",
]

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A hard limit: the coefficients of the chosen, summed, stay at or under `limit`."""

    name: str
    limit: float
    nodes: Mapping[int, np.ndarray] = field(default_factory=dict)
    edges: Mapping[Pair, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlap:
    """Adds max(0, constant + coefficients of the chosen) seconds: the part of a transfer that nothing hides."""

    constant: float = 0.0
    nodes: Mapping[int, np.ndarray] = field(default_factory=dict)
    edges: Mapping[Pair, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Pick one choice per node so that the seconds are least and every row holds; inf forbids.

    `edges` hold a matrix, or a `Way` where a matrix would be large, per pair of nodes.
    """

    names: tuple[str, ...]
    nodes: tuple[np.ndarray, ...]
    edges: Mapping[Pair, Any]
    rows: tuple[Row, ...] = ()
    overlaps: tuple[Overlap, ...] = ()

    def __post_init__(self) -> None:
        sizes = [len(costs) for costs in self.nodes]
        if len(self.names) != len(sizes):
            raise ValueError(f"'names' must name each of {len(sizes)} nodes, got {len(self.names)}")
        for costs in self.nodes:
            _check_costs("nodes", costs)
        for pair, costs in self.edges.items():
            _check_shape("edges", pair, costs, sizes)
            if isinstance(costs, np.ndarray):
                _check_costs(f"edges{pair}", costs)
        for term in (*self.rows, *self.overlaps):
            _check_term(term, sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each node."""
        return tuple(len(costs) for costs in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How the search went: what was left after each stage."""

    nodes: int = 0
    choices: int = 0
    kept_choices: int = 0
    sweeps: int = 0
    programs: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The chosen plan, its seconds, and the proven least seconds any plan can have.

    `prices` are those at which the bound was found: seconds per unit of each row's limit, by the row's name. `others`
    are the next best plans that were met. `free_s` is a bound on the seconds of any plan where memory has no limit.
    """

    choices: tuple[int, ...]
    objective_s: float
    bound_s: float
    gap: float
    status: str
    seconds: float
    stats: Stats
    prices: Mapping[str, float] = field(default_factory=dict)
    others: tuple[tuple[int, ...], ...] = ()
    free_s: float | None = None


def evaluate(problem: Problem, choices: Sequence[int]) -> float:
    """Seconds of a plan, overlaps included; inf when a node or pair of it is forbidden."""
    own = _chosen(problem.nodes, problem.edges, choices)
    return math.fsum(itertools.chain(own, (overlap_value(overlap, choices) for overlap in problem.overlaps)))


def row_value(row: Row, choices: Sequence[int]) -> float:
    """What a plan uses of a row, exactly rounded."""
    return math.fsum(_term_values(row, choices))


def overlap_value(overlap: Overlap, choices: Sequence[int]) -> float:
    """Seconds of a transfer that stay visible."""
    return max(0.0, math.fsum(itertools.chain((overlap.constant,), _term_values(overlap, choices))))


def within_rows(problem: Problem, choices: Sequence[int]) -> bool:
    """Whether a plan meets every row."""
    return all(row_value(row, choices) <= row.limit for row in problem.rows)


def brute_force(problem: Problem) -> Solution:
    """The best plan by trying all of them: for tests."""
    best: tuple[int, ...] | None = None
    least = math.inf
    for choices in itertools.product(*(range(size) for size in problem.sizes)):
        value = evaluate(problem, choices)
        if value < least and within_rows(problem, choices):
            best, least = choices, value
    if best is None:
        raise Infeasible("no plan satisfies the limits; every one of them was tried")
    return Solution(
        choices=best, objective_s=least, bound_s=least, gap=0.0, status="optimal", seconds=0.0, stats=Stats()
    )


def _chosen(nodes: Sequence[np.ndarray], edges: Mapping[Pair, Any], choices: Sequence[int]) -> Iterator[float]:
    for costs, choice in zip(nodes, choices, strict=True):
        yield float(costs[choice])
    for (i, j), costs in edges.items():
        yield float(costs[choices[i], choices[j]])


def _term_values(term: Row | Overlap, choices: Sequence[int]) -> Iterator[float]:
    for node, coefficients in term.nodes.items():
        yield float(coefficients[choices[node]])
    for (i, j), coefficients in term.edges.items():
        yield float(coefficients[choices[i], choices[j]])


def _check_costs(what: str, costs: np.ndarray) -> None:
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise ValueError(f"'{what}' must be seconds or inf, got nan or -inf")


def _check_shape(what: str, pair: Pair, costs: Any, sizes: Sequence[int]) -> None:
    i, j = pair
    if not 0 <= i < j < len(sizes) or costs.shape != (sizes[i], sizes[j]):
        raise ValueError(f"'{what}' must join i < j with one entry per pair of choices, got {pair}: {costs.shape}")


def _check_term(term: Row | Overlap, sizes: Sequence[int]) -> None:
    what = term.name if isinstance(term, Row) else "overlap"
    for node, coefficients in term.nodes.items():
        if not 0 <= node < len(sizes) or coefficients.shape != (sizes[node],):
            raise ValueError(f"'{what}' must have one coefficient per choice, got node {node}: {coefficients.shape}")
    for pair, coefficients in term.edges.items():
        _check_shape(what, pair, coefficients, sizes)
    if not all(np.isfinite(values).all() for values in (*term.nodes.values(), *term.edges.values())):
        raise ValueError(f"'{what}' must have finite coefficients, got inf or nan")

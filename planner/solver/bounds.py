"""Prices for rows and overlaps: at any prices the problem is nodes and pairs only, and its least total a bound.

max(0, e) is the largest of mu * e over mu in [0, 1]; a row adds lambda * (value - limit) with lambda >= 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from .elimination import Step, Tables, beliefs, decode, eliminate, is_exact, relaxed
from .messages import Messages
from .problem import Overlap, Pair, Problem, Row
from .program import Matrix, run
from .ways import Way

__all__ = ["Ascent", "Pricing", "Probe", "ascend", "by_messages", "by_tables", "match", "tables_at"]

Probe = Callable[[np.ndarray], tuple[float, np.ndarray]]

_NEAR = 1e-6
# Sweeps of messages at the first prices and at the next ones.
_FIRST, _NEXT = 400, 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """A folded problem ready to be priced; rows in units of their own spread, so that prices are seconds."""

    problem: Problem
    terms: tuple[Row | Overlap, ...]
    units: np.ndarray
    constants: np.ndarray
    ceilings: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> Pricing:
        """Rows first, then overlaps."""
        terms = (*problem.rows, *problem.overlaps)
        rows = len(problem.rows)
        units = np.array([max(_spread(row), 1e-30) for row in problem.rows] + [1.0] * len(problem.overlaps))
        constants = np.array([-row.limit for row in problem.rows] + [o.constant for o in problem.overlaps])
        ceilings = np.array([math.inf] * rows + [1.0] * len(problem.overlaps))
        return cls(problem=problem, terms=terms, units=units, constants=constants / units, ceilings=ceilings)

    def priced(self, prices: np.ndarray) -> tuple[list[np.ndarray], dict[Pair, np.ndarray], float]:
        """Nodes, edges and constant at these prices."""
        nodes = list(self.problem.nodes)
        edges = dict(self.problem.edges)
        for term, price, unit in zip(self.terms, prices.tolist(), self.units.tolist(), strict=True):
            if price != 0.0:
                for i, line in term.nodes.items():
                    nodes[i] = nodes[i] + line * (price / unit)
                for pair, matrix in term.edges.items():
                    edges[pair] = edges[pair] + matrix * (price / unit)
        return nodes, edges, float(prices @ self.constants)

    def values(self, steps: tuple[Step, ...], seats: list[dict[int, int]]) -> np.ndarray:
        """Value of each term at a relaxed plan (one seat per step), in its unit, against its limit."""
        parts: dict[int, list[tuple[int, float]]] = {}
        pairs: dict[Pair, tuple[int, int]] = {}
        for step, seat in zip(steps, seats, strict=True):
            parts.setdefault(step.node, []).append((seat[step.node], 1.0 / step.parts))
            pairs.update({(i, j): (seat[i], seat[j]) for i, j in step.edges})
        return self._shared(parts, pairs)

    def shared(self, seats: list[tuple[int, int, float]], pairs: Mapping[Pair, tuple[int, int]]) -> np.ndarray:
        """The same at (node, choice, share) and the choices of each pair."""
        parts: dict[int, list[tuple[int, float]]] = {}
        for node, choice, share in seats:
            parts.setdefault(node, []).append((choice, share))
        return self._shared(parts, pairs)

    def _shared(
        self, parts: Mapping[int, list[tuple[int, float]]], pairs: Mapping[Pair, tuple[int, int]]
    ) -> np.ndarray:
        totals = [
            math.fsum(float(line[c]) * share for i, line in term.nodes.items() for c, share in parts[i])
            + math.fsum(float(matrix[pairs[pair]]) for pair, matrix in term.edges.items())
            for term in self.terms
        ]
        return np.array(totals) / self.units + self.constants


@dataclass(slots=True, kw_only=True, eq=False)
class Ascent:
    """The best bound so far, the prices and shifts it was found at, and every plan met on the way."""

    prices: np.ndarray
    bound: float = -math.inf
    shifts: dict[int, np.ndarray] = field(default_factory=dict)
    plans: list[tuple[int, ...]] = field(default_factory=list)
    sweeps: int = 0

    def meet(self, plan: tuple[int, ...], offer: Callable[[tuple[int, ...]], float]) -> None:
        """Remember a plan met on the way and offer it."""
        self.plans.append(plan)
        offer(plan)


def ascend(
    pricing: Pricing,
    ascent: Ascent,
    probe: Probe,
    *,
    rounds: int,
    deadline: float,
    closed: Callable[[float], bool],
) -> None:
    """Raise the bound by cutting planes in a box around the best prices; `probe` gives bound and slope at prices."""
    count = len(pricing.terms)
    points = [ascent.prices]
    if np.isfinite(pricing.ceilings).any() and not ascent.prices.any():
        points.append(np.where(np.isinf(pricing.ceilings), 0.0, pricing.ceilings))
    cuts: list[tuple[float, np.ndarray]] = []
    radius = 1.0
    best = -math.inf
    ceiling = _most(pricing.problem) if count else math.inf
    unit = np.where(np.isinf(pricing.ceilings), 0.0, 1.0)
    for turn in range(rounds):
        if turn < len(points):
            prices, expected = points[turn], math.inf
        else:
            prices, expected = _master(cuts, ascent.prices, pricing.ceilings, radius, unit)
            if expected <= best + _NEAR * abs(best):
                return
        value, slope = probe(prices)
        if turn == 0:
            unit = np.where(np.isinf(pricing.ceilings), 0.1 * (abs(value) or ceiling), 1.0)
        cuts.append((value - float(slope @ prices), slope))
        if value > best:
            # A step that kept most of what the cuts promised earns a wider box; a poor one a narrower.
            radius *= 2.0 if value - best > 0.3 * (expected - best) else 1.0
            best = value
            ascent.prices = prices
            ascent.bound = max(ascent.bound, value)
        elif math.isfinite(expected):
            radius *= 0.5
        # A bound above every plan's seconds proves that none meets the rows: prices would grow for ever.
        if not count or closed(ascent.bound) or value > ceiling or time.perf_counter() > deadline:
            return


def match(pricing: Pricing, steps: tuple[Step, ...], ascent: Ascent, *, rounds: int, deadline: float) -> None:
    """Raise the bound by making the parts of split nodes agree: each choice's excess moves from part to part."""
    pace = 0.5
    trial = dict(ascent.shifts)
    for _ in range(rounds):
        if time.perf_counter() > deadline:
            return
        nodes, edges, constant = pricing.priced(ascent.prices)
        tables = eliminate(steps, nodes, edges, trial)
        ascent.sweeps += 2
        if tables.bound + constant < ascent.bound:
            pace *= 0.5
        else:
            gained = tables.bound + constant - ascent.bound
            ascent.bound, ascent.shifts = tables.bound + constant, dict(trial)
            if gained <= _NEAR * abs(ascent.bound):
                return
        own, _ = beliefs(replace(tables, shifts=trial))
        parts: dict[int, list[int]] = {}
        for index, step in enumerate(steps):
            if step.parts > 1:
                parts.setdefault(step.node, []).append(index)
        for indices in parts.values():
            mean = np.mean([own[index] for index in indices], axis=0)
            for index in indices:
                with np.errstate(invalid="ignore"):
                    move = np.nan_to_num((mean - own[index]) * pace, nan=0.0, posinf=0.0, neginf=0.0)
                # A choice that one part forbids moves for no part, so that the shifts still sum to zero.
                move[~np.isfinite(mean)] = 0.0
                trial[index] = trial.get(index, 0.0) + move


def tables_at(pricing: Pricing, steps: tuple[Step, ...], ascent: Ascent) -> tuple[Tables, float]:
    """The pass at the best prices and shifts, and the constant that its totals lack."""
    nodes, edges, constant = pricing.priced(ascent.prices)
    return eliminate(steps, nodes, edges, ascent.shifts), constant


def by_tables(
    pricing: Pricing, steps: tuple[Step, ...], ascent: Ascent, offer: Callable[[tuple[int, ...]], float]
) -> Probe:
    """Bound and slope at prices by one pass over the steps; `offer` gets each plan met."""

    def probe(prices: np.ndarray) -> tuple[float, np.ndarray]:
        nodes, edges, constant = pricing.priced(prices)
        tables = eliminate(steps, nodes, edges, ascent.shifts)
        ascent.sweeps += 1
        if math.isinf(tables.bound):
            return math.inf, np.zeros(len(prices))
        chosen = decode(tables)
        ascent.meet(tuple(chosen[node] for node in range(len(nodes))), offer)
        seats = [chosen] * len(steps) if is_exact(steps) else relaxed(tables)
        return tables.bound + constant, pricing.values(steps, seats)

    return probe


def by_messages(
    pricing: Pricing,
    messages: Messages,
    ascent: Ascent,
    offer: Callable[[tuple[int, ...]], float],
    *,
    deadline: float,
    closed: Callable[[float], bool],
) -> Probe:
    """Bound and slope at prices by sweeps of messages, kept from probe to probe: many at first, then a few."""

    def probe(prices: np.ndarray) -> tuple[float, np.ndarray]:
        nodes, edges, constant = pricing.priced(prices)
        messages.reprice(nodes, edges, constant)
        first = messages.sweeps == 0
        messages.climb(
            sweeps=_FIRST if first else _NEXT,
            deadline=deadline,
            enough=lambda bound: first and closed(bound),
            least_gain=1e-5 if first else 1e-4,
            rounded=lambda plan: ascent.meet(plan, offer),
        )
        ascent.sweeps = messages.sweeps
        bound, seats, pairs = messages.relaxed()
        return bound, pricing.shared(seats, pairs)

    return probe


def _master(
    cuts: list[tuple[float, np.ndarray]], center: np.ndarray, ceilings: np.ndarray, radius: float, unit: np.ndarray
) -> tuple[np.ndarray, float]:
    """Prices where the cuts promise most, and the promise."""
    money = max((abs(offset) for offset, _ in cuts), default=0.0) or 1.0
    here = center / unit
    most = ceilings / unit
    count, width = len(cuts), len(ceilings) + 1
    # Columns: prices in units, then the promise t as t <= offset + slope . prices for every cut.
    slopes = np.array([slope * unit / money for _, slope in cuts])
    matrix = Matrix(
        cost=np.array([0.0] * (width - 1) + [-1.0]),
        lower=np.concatenate([np.maximum(0.0, here - radius), [-np.inf]]),
        upper=np.concatenate([np.minimum(most, here + radius), [np.inf]]),
        integer=np.zeros(width, dtype=bool),
        starts=np.arange(0, count * width + 1, width, dtype=np.int32),
        index=np.tile(np.arange(width, dtype=np.int32), count),
        value=np.concatenate([-slopes, np.ones((count, 1))], axis=1).ravel(),
        row_lower=np.full(count, -np.inf),
        row_upper=np.array([offset / money for offset, _ in cuts]),
    )
    outcome = run(matrix, solver="highs", time_limit_s=10.0, gap=0.0)
    if outcome.values is None:
        return center, -math.inf
    return np.clip(outcome.values[:-1], 0.0, most) * unit, -outcome.bound * money


def _most(problem: Problem) -> float:
    """At least the seconds of any allowed plan."""
    written = [v for v in problem.edges.values() if not isinstance(v, Way)]
    largest = [float(np.where(np.isfinite(v), v, -math.inf).max()) for v in (*problem.nodes, *written)]
    largest += [v.most for v in problem.edges.values() if isinstance(v, Way)]
    total = math.fsum(abs(value) for value in largest if math.isfinite(value))
    for overlap in problem.overlaps:
        values = (*overlap.nodes.values(), *overlap.edges.values())
        total += max(0.0, overlap.constant + math.fsum(float(v.max()) for v in values))
    return total


def _spread(term: Row | Overlap) -> float:
    values: Mapping[object, np.ndarray] = {**term.nodes, **term.edges}
    return math.fsum(float(np.ptp(v)) for v in values.values()) * 0.1

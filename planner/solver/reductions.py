"""Smaller problems with the same best plan: forbidden, unmatched and beaten choices leave, free nodes are folded.

Node indices never change; a node that is gone has one choice left. A `Lift` maps a plan of the smaller problem back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...plans.errors import Infeasible
from .elimination import decode, eliminate, order
from .problem import Overlap, Pair, Problem, Row
from .ways import WRITTEN_OUT, Way

__all__ = ["Lift", "absorb", "clean", "complete", "consistent", "dominated", "fold", "restrict"]

# Most entries of a table that absorbs a node, and of a block of choices compared at once.
_TABLE = 1 << 23
_BLOCK = 1 << 18
# Most entries compared to settle which choices of one node are beaten.
_PAIRS = 3_000_000

Lift = Callable[[tuple[int, ...]], tuple[int, ...]]


def complete(problem: Problem) -> Problem:
    """Float arrays throughout, and an edge wherever a row or overlap couples two nodes."""
    nodes = tuple(np.asarray(costs, dtype=np.float64) for costs in problem.nodes)
    edges = {pair: c if isinstance(c, Way) else np.asarray(c, dtype=np.float64) for pair, c in problem.edges.items()}
    for term in (*problem.rows, *problem.overlaps):
        for pair, coefficients in term.edges.items():
            edges.setdefault(pair, np.zeros(coefficients.shape))
    return replace(problem, nodes=nodes, edges=edges)


def restrict(problem: Problem, keeps: Sequence[np.ndarray]) -> tuple[Problem, Lift]:
    """The problem with only the kept choices of each node."""
    full = [len(keep) == size for keep, size in zip(keeps, problem.sizes, strict=True)]

    def lines(given: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        return {i: line if full[i] else line[keeps[i]] for i, line in given.items()}

    def matrices(given: Mapping[Pair, Any]) -> dict[Pair, Any]:
        return {(i, j): m if full[i] and full[j] else _picked(m, keeps[i], keeps[j]) for (i, j), m in given.items()}

    smaller = replace(
        problem,
        nodes=tuple(lines(dict(enumerate(problem.nodes))).values()),
        edges=matrices(problem.edges),
        rows=tuple(replace(row, nodes=lines(row.nodes), edges=matrices(row.edges)) for row in problem.rows),
        overlaps=tuple(replace(o, nodes=lines(o.nodes), edges=matrices(o.edges)) for o in problem.overlaps),
    )
    kept = tuple(keeps)
    return smaller, lambda plan: tuple(int(keep[c]) for keep, c in zip(kept, plan, strict=True))


def _picked(costs: Any, rows: np.ndarray, columns: np.ndarray) -> Any:
    """The costs between some choices; as a matrix where that is small."""
    if not isinstance(costs, Way):
        return costs[np.ix_(rows, columns)]
    smaller = costs.restricted(rows, columns)
    return smaller if smaller.size > WRITTEN_OUT // 10 and min(smaller.shape) > 1 else np.asarray(smaller)


def clean(problem: Problem) -> tuple[Problem, list[Lift]]:
    """Drop what no best plan needs until nothing more goes."""
    lifts: list[Lift] = []
    while True:
        before = problem.sizes
        for find in (consistent, dominated):
            problem, lift = restrict(problem, find(problem))
            lifts.append(lift)
        problem = fold(problem)
        if problem.sizes == before:
            return problem, lifts


def consistent(problem: Problem) -> list[np.ndarray]:
    """Per node, the choices that are allowed, have a partner on every edge and fit every row."""
    alive = [np.isfinite(costs) for costs in problem.nodes]
    for row in problem.rows:
        _fit(problem, row, alive)
    touching: dict[int, list[Pair]] = {}
    for pair in problem.edges:
        for node in pair:
            touching.setdefault(node, []).append(pair)
    allowed = {p: m if isinstance(m, Way) else np.isfinite(m) for p, m in problem.edges.items()}
    queue = dict.fromkeys(problem.edges)
    while queue:
        pair = next(iter(queue))
        del queue[pair]
        i, j = pair
        left, right = _partnered(allowed[pair], alive[i], alive[j])
        for node, partnered in ((i, left), (j, right)):
            if partnered.sum() < alive[node].sum():
                alive[node] = partnered
                queue.update(dict.fromkeys(p for p in touching[node] if p != pair))
        if not left.any():
            raise Infeasible(
                f"'{problem.names[i]}' and '{problem.names[j]}' must have a pair of choices that fit together, got none"
            )
    for node, left in enumerate(alive):
        if not left.any():
            raise Infeasible(f"'{problem.names[node]}' must have a choice that is allowed, got none")
    return [np.flatnonzero(left) for left in alive]


def _partnered(allowed: Any, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which choices that are alive at either end have a partner that is."""
    if isinstance(allowed, Way):
        left = left & allowed.T.partnered(right)
        return left, right & allowed.partnered(left)
    table = allowed & left[:, None] & right
    return np.any(table, axis=1), np.any(table, axis=0)


def _fit(problem: Problem, row: Row, alive: list[np.ndarray]) -> None:
    """Mark choices whose own coefficient, with the least of all others, is over the limit."""
    least = [*row.nodes.values(), *row.edges.values()]
    floor = sum(float(values.min()) for values in least)
    # Sums of large coefficients round: a choice at the limit must stay.
    slack = 1e-9 * (abs(row.limit) + sum(float(np.abs(values).max()) for values in least))
    for node, line in row.nodes.items():
        fits = np.asarray(line - line.min() <= row.limit - floor + slack)
        if floor <= row.limit + slack and (alive[node] & fits).any():
            alive[node] = np.logical_and(alive[node], fits)


def dominated(problem: Problem) -> list[np.ndarray]:
    """Per node, the choices that no other choice beats whatever its neighbours choose."""
    neighbours: dict[int, list[tuple[int, Pair]]] = {}
    for pair in problem.edges:
        for place in (0, 1):
            neighbours.setdefault(pair[place], []).append((pair[1 - place], pair))
    keeps = [np.arange(size) for size in problem.sizes]
    for node, size in enumerate(problem.sizes):
        # Comparing choices along a way would write it out.
        if size > 1 and not any(isinstance(problem.edges[pair], Way) for _, pair in neighbours.get(node, [])):
            view = _View(problem=problem, node=node, keeps=keeps, neighbours=neighbours.get(node, []))
            keeps[node] = view.survivors()
    return keeps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """One node with its edges, given what is already dropped from the others."""

    problem: Problem
    node: int
    keeps: list[np.ndarray]
    neighbours: list[tuple[int, Pair]]

    def survivors(self) -> np.ndarray:
        """Choices left after all pairs (worse, better) were compared; a tie leaves the first."""
        costs = self.problem.nodes[self.node]
        worse, better = np.nonzero(~np.eye(len(costs), dtype=bool))
        # A few columns of each edge already refute most pairs, so the full comparison sees few of them.
        columns = sum(len(self.keeps[other]) for other, _ in self.neighbours)
        for width in (2, 8, None):
            if width is None and len(worse) * columns > _PAIRS:
                # Comparing would take longer than carrying the choices along.
                return np.arange(len(costs))
            margin = self._margin(worse, better, width)
            passed = margin >= 0.0
            worse, better = worse[passed], better[passed]
        beats = np.zeros((len(costs), len(costs)), dtype=bool)
        beats[worse, better] = True
        strictly = beats & ~(beats.T & (np.arange(len(costs))[:, None] < np.arange(len(costs))))
        return np.flatnonzero(~strictly.any(axis=1))

    def _margin(self, worse: np.ndarray, better: np.ndarray, width: int | None) -> np.ndarray:
        """Least seconds saved by the better choice; -inf where it uses more of a row."""
        costs = self.problem.nodes[self.node]
        margin = costs[worse] - costs[better]
        for other, pair in self.neighbours:
            with np.errstate(invalid="ignore"):
                # inf - inf is nan and refutes: some neighbour forbids the better choice.
                margin = margin + self._extreme(self.problem.edges[pair], pair, other, worse, better, width)
        for row in self.problem.rows:
            margin[self._increase(row, worse, better, width) > 0.0] = -np.inf
        for overlap in self.problem.overlaps:
            margin = margin - np.maximum(self._increase(overlap, worse, better, width), 0.0)
        return margin

    def _increase(self, term: Row | Overlap, worse: np.ndarray, better: np.ndarray, width: int | None) -> np.ndarray:
        """Most that a term grows when the better choice replaces the worse one."""
        total = np.zeros(len(worse))
        if self.node in term.nodes:
            line = term.nodes[self.node]
            total += line[better] - line[worse]
        for other, pair in self.neighbours:
            if pair in term.edges:
                total -= self._extreme(term.edges[pair], pair, other, worse, better, width)
        return total

    def _extreme(
        self, matrix: np.ndarray, pair: Pair, other: int, worse: np.ndarray, better: np.ndarray, width: int | None
    ) -> np.ndarray:
        """Least of matrix[worse] - matrix[better] over the neighbour's choices; both forbidden count as no bar."""
        table = matrix if pair[0] == self.node else matrix.T
        columns = self.keeps[other]
        if width is not None and len(columns) > width:
            columns = columns[:: -(-len(columns) // width)]
        table = np.ascontiguousarray(table[:, columns])
        out = np.empty(len(worse))
        stride = max(1, _BLOCK // len(columns))
        for start in range(0, len(worse), stride):
            part = slice(start, start + stride)
            with np.errstate(invalid="ignore"):
                change = table[worse[part]] - table[better[part]]
            out[part] = np.fmin.reduce(change, axis=1, initial=np.inf)
        return out


def fold(problem: Problem) -> Problem:
    """Move what is settled out of edges, rows and overlaps: single choices, flat edges, terms that cannot bind."""
    nodes = list(problem.nodes)
    edges = dict(problem.edges)
    rows: list[Row] = []
    for row in problem.rows:
        lines, matrices, constant = _settle(row, problem.sizes)
        limit = row.limit - constant
        if _extent(lines, matrices, np.max) > limit:
            rows.append(replace(row, limit=limit, nodes=lines, edges=matrices))
    overlaps: list[Overlap] = []
    for overlap in problem.overlaps:
        lines, matrices, constant = _settle(overlap, problem.sizes)
        constant += overlap.constant
        if nodes and constant + _extent(lines, matrices, np.min) >= 0.0:
            nodes[0] = nodes[0] + constant
            for i, line in lines.items():
                nodes[i] = nodes[i] + line
            edges.update({pair: edges[pair] + matrix for pair, matrix in matrices.items()})
        elif constant + _extent(lines, matrices, np.max) > 0.0:
            overlaps.append(Overlap(constant=constant, nodes=lines, edges=matrices))
    coupled = {pair for term in (*rows, *overlaps) for pair in term.edges}
    for pair in [pair for pair in edges if pair not in coupled]:
        matrix, (i, j) = edges[pair], pair
        if isinstance(matrix, Way):
            continue
        if matrix.shape[0] == 1 or (matrix == matrix[:1]).all():
            nodes[j] = nodes[j] + matrix[0]
            del edges[pair]
        elif matrix.shape[1] == 1 or (matrix == matrix[:, :1]).all():
            nodes[i] = nodes[i] + matrix[:, 0]
            del edges[pair]
    return replace(problem, nodes=tuple(nodes), edges=edges, rows=tuple(rows), overlaps=tuple(overlaps))


def absorb(problem: Problem) -> tuple[Problem, Lift | None]:
    """Eliminate nodes with at most two neighbours that no row or overlap mentions."""
    terms = (*problem.rows, *problem.overlaps)
    written = {pair: matrix for pair, matrix in problem.edges.items() if not isinstance(matrix, Way)}
    carrying = {node for term in terms for node in term.nodes} | {n for t in terms for pair in t.edges for n in pair}
    carrying |= {node for pair in problem.edges if pair not in written for node in pair}
    free = frozenset(i for i, size in enumerate(problem.sizes) if size > 1 and i not in carrying)
    steps = order(problem.sizes, written, cap=_TABLE, only=free)
    if not steps:
        return problem, None
    tables = eliminate(steps, problem.nodes, written)
    gone = {pair for step in steps for pair in step.edges}
    used = {source for step in steps for source in step.inputs}
    nodes = list(problem.nodes)
    edges = {pair: matrix for pair, matrix in problem.edges.items() if pair not in gone}
    for index, step in enumerate(steps):
        nodes[step.node] = np.zeros(1)
        message = tables.messages[index]
        if index in used:
            continue
        if len(step.scope) == 0:
            nodes[step.node] = message.reshape(1)
        elif len(step.scope) == 1:
            nodes[step.scope[0]] = nodes[step.scope[0]] + message
        else:
            pair = (step.scope[0], step.scope[1])
            edges[pair] = edges[pair] + message if pair in edges else message

    def lift(plan: tuple[int, ...]) -> tuple[int, ...]:
        kept = {node: choice for node, choice in enumerate(plan) if node not in eliminated}
        chosen = decode(tables, kept)
        return tuple(chosen[node] for node in range(len(plan)))

    eliminated = {step.node for step in steps}
    return replace(problem, nodes=tuple(nodes), edges=edges), lift


def _settle(term: Row | Overlap, sizes: Sequence[int]) -> tuple[dict[int, np.ndarray], dict[Pair, np.ndarray], float]:
    """A term's coefficients without those that are the same for every choice, and what these sum to."""
    lines = dict(term.nodes)
    matrices: dict[Pair, np.ndarray] = {}
    for (i, j), matrix in term.edges.items():
        if sizes[i] == 1:
            lines[j] = lines[j] + matrix[0] if j in lines else matrix[0]
        elif sizes[j] == 1:
            lines[i] = lines[i] + matrix[:, 0] if i in lines else matrix[:, 0]
        elif matrix.any():
            matrices[i, j] = matrix
    flat = {i for i, line in lines.items() if (line == line[0]).all()}
    constant = math.fsum(float(lines[i][0]) for i in flat)
    return {i: line for i, line in lines.items() if i not in flat}, matrices, constant


def _extent(
    lines: Mapping[int, np.ndarray], matrices: Mapping[Pair, np.ndarray], of: Callable[[np.ndarray], float]
) -> float:
    return math.fsum(float(of(values)) for values in (*lines.values(), *matrices.values()))

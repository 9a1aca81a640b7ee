"""A bound and plans by messages along the pairs of a problem: sequential tree-reweighted passing (Kolmogorov, 2006).

Messages move costs between nodes and pairs without changing any plan's total. The nodes stand in an order; every node
splits its cost evenly over chains that run through it along the order, and the sum of the chains' least totals is a
bound on every plan. A sweep there and back over all pairs raises it. Where the relaxation of the problem to
fractional choices is integral, as sharding problems mostly are, the bound meets the best plan.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cost_models.pipeline.kernel import compiled
from .elimination import Totals
from .problem import Pair
from .ways import Way

__all__ = ["Messages"]

# Sweeps between looks at what they gained.
_LOOK = 8


@dataclass(slots=True, kw_only=True, eq=False)
class Messages:
    """Nodes with two choices or more and the pairs between them, at some prices; and the messages so far.

    `tables[i, j]` has the costs of a pair with the choices of i as rows, in both directions. `messages[i, j]` is what i
    tells j, per choice of j.
    """

    order: list[int]
    place: dict[int, int]
    later: dict[int, list[int]]
    earlier: dict[int, list[int]]
    share: dict[int, float]
    nodes: dict[int, np.ndarray]
    tables: dict[Pair, Any]
    constant: float
    count: int
    messages: dict[Pair, np.ndarray] = field(default_factory=dict)
    sweeps: int = 0

    @classmethod
    def of(cls, nodes: Sequence[np.ndarray], edges: Mapping[Pair, Any]) -> Messages:
        """Set up; edges must join nodes with two choices or more (see reductions.fold)."""
        sizes = [len(line) for line in nodes]
        live = [i for i, size in enumerate(sizes) if size > 1]
        beside: dict[int, list[int]] = {i: [] for i in live}
        for i, j in edges:
            beside[i].append(j)
            beside[j].append(i)
        order = _walk(live, beside)
        place = {node: k for k, node in enumerate(order)}
        later = {i: sorted((j for j in beside[i] if place[j] > place[i]), key=place.__getitem__) for i in live}
        earlier = {i: sorted((j for j in beside[i] if place[j] < place[i]), key=place.__getitem__) for i in live}
        made = cls(
            order=order,
            place=place,
            later=later,
            earlier=earlier,
            share={i: 1.0 / max(len(later[i]), len(earlier[i]), 1) for i in live},
            nodes={},
            tables={},
            constant=0.0,
            count=len(nodes),
            messages={(i, j): np.zeros(sizes[j]) for i in live for j in beside[i]},
        )
        made.reprice(nodes, edges)
        return made

    def reprice(self, nodes: Sequence[np.ndarray], edges: Mapping[Pair, Any], constant: float = 0.0) -> None:
        """Take other costs on the same nodes and pairs; the messages stay, and any messages give a bound."""
        self.nodes = {i: nodes[i] for i in self.order}
        self.constant = constant + math.fsum(float(line[0]) for line in nodes if len(line) == 1)
        for (i, j), matrix in edges.items():
            if self.tables.get((i, j)) is not matrix:
                self.tables[i, j] = matrix if isinstance(matrix, Way) else np.ascontiguousarray(matrix)
                self.tables[j, i] = matrix.T if isinstance(matrix, Way) else np.ascontiguousarray(matrix.T)

    def climb(
        self,
        *,
        sweeps: int,
        deadline: float,
        enough: Callable[[float], bool],
        least_gain: float,
        rounded: Callable[[tuple[int, ...]], object],
    ) -> float:
        """Sweep until `enough`, the deadline, or gains per look of less than `least_gain` of the bound; the bound.

        At each look `rounded` gets a plan.
        """
        best = bound = -math.inf
        for turn in range(1, sweeps + 1):
            self._sweep(self.order, self.later)
            bound = self._sweep(self.order[::-1], self.earlier)
            self.sweeps += 1
            if turn % _LOOK == 0 or turn == sweeps:
                rounded(self.rounded())
                if enough(bound) or time.perf_counter() > deadline:
                    return bound
                if bound - best <= least_gain * abs(bound):
                    return bound
                best = bound
        return bound

    def _sweep(self, order: Sequence[int], toward: Mapping[int, list[int]]) -> float:
        """One pass along an order: every node gathers what it was told and tells the nodes after it; the bound."""
        bound = self.constant
        for i in order:
            line = self._gathered(i)
            least = line.min()
            bound += float(least)
            line = (line - least) * self.share[i]
            for j in toward[i]:
                told = _least(line - self.messages[j, i], self.tables[i, j])
                least = told.min()
                bound += float(least)
                self.messages[i, j] = told - least
        return bound

    def _gathered(self, i: int) -> np.ndarray:
        line = self.nodes[i].copy()
        for j in (*self.earlier[i], *self.later[i]):
            line += self.messages[j, i]
        return line

    def rounded(self) -> tuple[int, ...]:
        """A plan, node by node along the order: what was chosen before counts as it is, what comes as it tells."""
        plan: dict[int, int] = {}
        for i in self.order:
            line = self.nodes[i].copy()
            for j in self.earlier[i]:
                line += self.tables[j, i][plan[j]]
            for j in self.later[i]:
                line += self.messages[j, i]
            plan[i] = int(line.argmin())
        return tuple(plan.get(i, 0) for i in range(self.count))

    # -- the chains of the present messages, exactly -----------------------------------------------------------------

    def _before(self, i: int, j: int) -> Pair | None:
        """The pair that comes before (i, j) in its chain."""
        at = self.later[i].index(j)
        return (self.earlier[i][at], i) if at < len(self.earlier[i]) else None

    def _after(self, i: int, j: int) -> Pair | None:
        """The pair that comes after (i, j) in its chain."""
        at = self.earlier[j].index(i)
        return (j, self.later[j][at]) if at < len(self.later[j]) else None

    def _forward(self) -> tuple[dict[int, np.ndarray], dict[Pair, np.ndarray], dict[Pair, float]]:
        """Each node's part in a chain, least totals from each chain's start to the end of a pair, and each chain's
        least total under its last pair."""
        parts = {i: self._gathered(i) * self.share[i] for i in self.order}
        reached: dict[Pair, np.ndarray] = {}
        least: dict[Pair, float] = {}
        for i in self.order:
            for j in self.later[i]:
                before = self._before(i, j)
                start = parts[i] if before is None else parts[i] + reached[before]
                reached[i, j] = _least(start - self.messages[j, i], self.tables[i, j]) - self.messages[i, j]
                if self._after(i, j) is None:
                    least[i, j] = float((reached[i, j] + parts[j]).min())
        return parts, reached, least

    def _alone(self, parts: Mapping[int, np.ndarray]) -> float:
        return math.fsum(float(parts[i].min()) for i in self.order if not self.later[i] and not self.earlier[i])

    def relaxed(self) -> tuple[float, list[tuple[int, int, float]], dict[Pair, tuple[int, int]]]:
        """The bound, and the choices that attain it: (node, choice, share) over all chains, and those of every pair."""
        parts, reached, least = self._forward()
        bound = self.constant + math.fsum(least.values()) + self._alone(parts)
        seats: list[tuple[int, int, float]] = []
        pairs: dict[Pair, tuple[int, int]] = {}
        for i in self.order:
            if not self.later[i] and not self.earlier[i]:
                seats.append((i, int(parts[i].argmin()), 1.0))
        for end in least:
            at: Pair | None = end
            choice = int((reached[end] + parts[end[1]]).argmin())
            seats.append((end[1], choice, self.share[end[1]]))
            while at is not None:
                i, j = at
                before = self._before(i, j)
                line = parts[i] - self.messages[j, i] + self.tables[j, i][choice]
                if before is not None:
                    line = line + reached[before]
                here = int(line.argmin())
                seats.append((i, here, self.share[i]))
                pairs[(i, j) if i < j else (j, i)] = (here, choice) if i < j else (choice, here)
                at, choice = before, here
        return bound, seats, pairs

    def totals(self) -> Totals:
        """Least totals of the chains with each choice and each pair of choices fixed."""
        parts, reached, least = self._forward()
        bound = self.constant + math.fsum(least.values()) + self._alone(parts)
        back: dict[Pair, np.ndarray] = {}
        of: dict[Pair, float] = dict(least)
        for j in reversed(self.order):
            for i in self.earlier[j]:
                after = self._after(i, j)
                start = parts[j] if after is None else parts[j] + back[after]
                back[i, j] = _least(start - self.messages[i, j], self.tables[j, i]) - self.messages[j, i]
                if after is not None:
                    of[i, j] = of[after]
        nodes = {i: self._through(i, parts[i], reached, back, of) + bound for i in self.order}

        def edges(pair: Pair) -> np.ndarray:
            i, j = pair if self.place[pair[0]] < self.place[pair[1]] else pair[::-1]
            before, after = self._before(i, j), self._after(i, j)
            start = parts[i] - self.messages[j, i] + (0.0 if before is None else reached[before])
            stop = parts[j] - self.messages[i, j] + (0.0 if after is None else back[after]) + (bound - of[i, j])
            found = start[:, None] + np.asarray(self.tables[i, j]) + stop
            return found if (i, j) == pair else found.T

        return Totals(bound=bound, nodes=nodes, edges=edges)

    def _through(self, i: int, part: np.ndarray, reached: dict, back: dict, of: dict) -> np.ndarray:
        """What each choice of a node adds to the least totals of the chains that run through it."""
        total = np.zeros(len(part))
        if not self.earlier[i] and not self.later[i]:
            return part - part.min()
        for at in range(max(len(self.earlier[i]), len(self.later[i]))):
            line = part.copy()
            chain = 0.0
            if at < len(self.earlier[i]):
                pair = (self.earlier[i][at], i)
                line += reached[pair]
                chain = of[pair]
            if at < len(self.later[i]):
                pair = (i, self.later[i][at])
                line += back[pair]
                chain = of[pair]
            total += line - chain
        return total


def _least(line: np.ndarray, table: np.ndarray | Way) -> np.ndarray:
    """Least of line[a] + table[a, b] over a."""
    if isinstance(table, Way):
        return table.least(line)
    return _least_sums(line, table)


@compiled
def _least_sums(line: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Compiled, since sweeps are little else; the sums of all pairs are not written out."""
    rows, columns = table.shape
    found = np.full(columns, np.inf)
    for a in range(rows):
        start = line[a]
        for b in range(columns):
            total = start + table[a, b]
            found[b] = total if total < found[b] else found[b]
    return found


def _walk(live: Sequence[int], beside: Mapping[int, list[int]]) -> list[int]:
    """Nodes breadth first, so that neighbours stand near each other."""
    seen: set[int] = set()
    found: list[int] = []
    for root in live:
        if root in seen:
            continue
        seen.add(root)
        queue = deque([root])
        while queue:
            node = queue.popleft()
            found.append(node)
            for other in sorted(beside[node]):
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
    return found

"""Partition, placement and schedule of a small profile as one integer program: what judges the search.

Without overheads no plan is better than the best one whose stages are single units: what a longer stage does at once,
its units can do one after the other on the same rank. So a unit has a rank, each of its F, I and W of each micro-batch
a start, and of two actions that may share a rank one comes first. Micro-batches are alike and stay in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pulp

from ...plans import RequestError
from ..solver.program import highs
from .profiles import LayerProfile

__all__ = ["exact_time"]

_F, _I, _W = 0, 1, 2
_MOST_ACTIONS = 40
_Action = tuple[int, int, int]


def exact_time(
    profile: LayerProfile,
    ranks: int,
    microbatches: int,
    *,
    limits: Sequence[float] | None = None,
    seconds: float = 60.0,
) -> tuple[float, float]:
    """The least step time that a plan reaches, and what is proved of it: the same if the program was solved.

    Time in the profile's unit; limits: memory per rank. RequestError beyond 40 actions, which would take hours.
    """
    actions = list(product(range(3), range(profile.units), range(microbatches)))
    if len(actions) > _MOST_ACTIONS or profile.units < ranks:
        raise RequestError(
            f"'profile' must have at least a unit per rank and at most {_MOST_ACTIONS} actions to be solved exactly,"
            f" got {profile.units} units on {ranks} ranks and {len(actions)} actions; use fewer layers or micro-batches"
        )
    return _Program(profile, ranks, microbatches, limits).solve(seconds)


class _Program:
    """The variables: place[u, r], same[u, v], start[a], first[a, b]; and what holds between them."""

    def __init__(self, profile: LayerProfile, ranks: int, microbatches: int, limits: Sequence[float] | None) -> None:
        self.profile, self.ranks, self.count = profile, ranks, microbatches
        self.units = range(profile.units)
        self.actions: list[_Action] = list(product(range(3), self.units, range(microbatches)))
        self.most = microbatches * math.fsum(map(sum, profile.costs)) + 2 * profile.units * profile.delay + 1.0
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self.time = self.problem.add_variable("time", lowBound=0)
        self.problem += self.time
        self.start = {
            action: self.problem.add_variable(f"start_{number}", lowBound=0)
            for number, action in enumerate(self.actions)
        }
        self._places(limits)
        self._data()
        self._orders()
        if limits is not None:
            self._memory(limits)

    def solve(self, seconds: float) -> tuple[float, float]:
        self.problem.solve(highs(seconds, 0.0))
        model = self.problem.solverModel
        proved = model.getInfo().mip_dual_bound if model is not None else 0.0
        return float(self.time.value() or math.inf), float(proved)

    def _length(self, action: _Action) -> float:
        return self.profile.costs[action[1]][action[0]]

    def _places(self, limits: Sequence[float] | None) -> None:
        self.place = {
            (unit, rank): self.problem.add_variable(f"x_{unit}_{rank}", cat="Binary")
            for unit in self.units
            for rank in range(self.ranks)
        }
        self.same = {
            pair: self.problem.add_variable(f"same_{pair[0]}_{pair[1]}", lowBound=0, upBound=1)
            for pair in combinations(self.units, 2)
        }
        if limits is None or len(set(limits)) == 1:
            # The ranks are alike: the first unit is on the first.
            self.problem += self.place[0, 0] == 1
        for unit in self.units:
            self.problem += pulp.lpSum(self.place[unit, rank] for rank in range(self.ranks)) == 1
        for rank in range(self.ranks):
            own = [(sum(self.profile.costs[unit]), self.place[unit, rank]) for unit in self.units]
            self.problem += self.time >= self.count * pulp.lpSum(cost * placed for cost, placed in own)
            self.problem += pulp.lpSum(placed for _, placed in own) >= 1
        for (u, v), same in self.same.items():
            for rank in range(self.ranks):
                self.problem += same >= self.place[u, rank] + self.place[v, rank] - 1
                self.problem += same <= 1 + self.place[u, rank] - self.place[v, rank]

    def _together(self, u: int, v: int) -> Any:
        return 1 if u == v else self.same[min(u, v), max(u, v)]

    def _after(self, later: _Action, sooner: _Action) -> None:
        """`later` starts after the end of `sooner`, and a transfer between ranks."""
        lag = self.profile.delay * (1 - self._together(later[1], sooner[1]))
        self.problem += self.start[later] >= self.start[sooner] + self._length(sooner) + lag

    def _data(self) -> None:
        last = self.profile.units - 1
        for kind, unit, index in self.actions:
            action = (kind, unit, index)
            self.problem += self.time >= self.start[action] + self._length(action)
            if index:
                self._after(action, (kind, unit, index - 1))
            if kind == _F and unit:
                self._after(action, (_F, unit - 1, index))
            elif kind == _I:
                self._after(action, (_F, unit, index))
                if unit < last:
                    self._after(action, (_I, unit + 1, index))
            elif kind == _W:
                self._after(action, (_I, unit, index))

    def _orders(self) -> None:
        """first[a, b] = 1: a comes before b if they share a rank."""
        self.first: dict[tuple[_Action, _Action], Any] = {}
        for number, (a, b) in enumerate(combinations(self.actions, 2)):
            first = self.problem.add_variable(f"first_{number}", cat="Binary")
            self.first[a, b], self.first[b, a] = first, 1 - first
            apart = self.most * (1 - self._together(a[1], b[1]))
            self.problem += self.start[b] >= self.start[a] + self._length(a) - self.most * (1 - first) - apart
            self.problem += self.start[a] >= self.start[b] + self._length(b) - self.most * first - apart

    def _memory(self, limits: Sequence[float]) -> None:
        """Before each F its rank holds no more than its limit less what that F takes; I and W give back half each."""
        held = self.profile.memory
        most = self.count * math.fsum(held)
        for number, action in enumerate(self.actions):
            if action[0] != _F or held[action[1]] <= 0:
                continue
            sum_: list[Any] = [held[action[1]]]
            for other in self.actions:
                if other == action or held[other[1]] <= 0:
                    continue
                counts = self.problem.add_variable(f"held_{number}_{len(sum_)}", lowBound=0, upBound=1)
                together = self._together(action[1], other[1])
                if other[0] == _F:
                    self.problem += counts >= self.first[other, action] + together - 1
                    sum_.append(held[other[1]] * counts)
                else:
                    self.problem += counts <= self.first[other, action]
                    self.problem += counts <= together
                    sum_.append(-held[other[1]] / 2 * counts)
            for rank, limit in enumerate(limits):
                self.problem += pulp.lpSum(sum_) <= limit + most * (1 - self.place[action[1], rank])

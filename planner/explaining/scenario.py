"""One request, solved again and again: with constraints left out, choices ruled out, or another memory limit."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from ...plans.errors import Infeasible
from ..api import Draft
from ..sharding.constraints import Constraint, Constraints
from ..solver.problem import Problem, Solution

__all__ = ["Found", "Mask", "Scenario", "forbid"]

# Which choices of a decision are left.
Mask = Mapping[int, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a solve came to: a solution, or proof that there is none (`impossible`), or neither in the time given."""

    draft: Draft
    solution: Solution | None
    impossible: bool
    reason: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Scenario:
    """A draft whose constraints are not held yet (`draft(..., held=False)`), with what each of them rules out."""

    open: Draft
    constraints: tuple[Constraint, ...]
    masks: tuple[Mask, ...]
    deadline: float

    @classmethod
    def of(cls, prepared: Draft, *, time_limit_s: float) -> Scenario:
        """The scenario of a draft; all its solves together take about `time_limit_s`."""
        texts = prepared.options.constraints
        items = Constraints.of(texts, prepared.formulation.mesh.ndim).items
        masks = tuple(_mask(prepared, constraint) for constraint in items)
        return cls(open=prepared, constraints=items, masks=masks, deadline=time.perf_counter() + time_limit_s)

    @property
    def left_s(self) -> float:
        """Seconds until the time is up."""
        return max(0.0, self.deadline - time.perf_counter())

    def draft(
        self, *, without: Collection[int] = (), limit: int | None = None, also: Sequence[Mask] = (), free: bool = False
    ) -> Draft:
        """The draft without the constraints numbered `without`, `also` with other choices ruled out, with a memory
        limit of `limit` bytes. In a `free` one every plan costs the same, so that the first that fits will do."""
        kept = [mask for number, mask in enumerate(self.masks) if number not in without]
        problem = self.open.formulation.problem
        problem = forbid(_flat(problem) if free else problem, [*kept, *also])
        options = msgspec.structs.replace(
            self.open.options,
            constraints=tuple(str(c) for number, c in enumerate(self.constraints) if number not in without),
            memory_limit_bytes=self.open.options.memory_limit_bytes if limit is None else limit,
        )
        return self.open.changed(replace(self.open.formulation, problem=problem), options)

    def solve(
        self, prepared: Draft, *, share: float = 1.0, gap: float = 1e-6, warm: Sequence[int] | None = None
    ) -> Found:
        """Solve within `share` of the time that is left."""
        if self.left_s <= 0.0:
            return Found(draft=prepared, solution=None, impossible=False, reason="time ran out")
        try:
            limit_s = max(0.1, self.left_s * share)
            found = prepared.solve(time_limit_s=limit_s, gap=gap, warm=warm)
        except Infeasible as error:
            unknown = "in the time given" in str(error)
            return Found(draft=prepared, solution=None, impossible=not unknown, reason=str(error))
        return Found(draft=prepared, solution=found, impossible=False)


def forbid(problem: Problem, masks: Sequence[Mask]) -> Problem:
    """`problem` without the choices that any of `masks` rules out."""
    nodes = list(problem.nodes)
    for mask in masks:
        for index, kept in mask.items():
            nodes[index] = np.where(kept, nodes[index], np.inf)
    return replace(problem, nodes=tuple(nodes))


def _flat(problem: Problem) -> Problem:
    """Every plan costs one second: the relative gap of nothing would have no meaning."""
    nodes = [np.where(np.isfinite(costs), 0.0, np.inf) for costs in problem.nodes]
    if nodes:
        nodes[0] = nodes[0] + 1.0
    edges = {pair: np.where(np.isfinite(costs), 0.0, np.inf) for pair, costs in problem.edges.items()}
    return replace(problem, nodes=tuple(nodes), edges=edges, overlaps=())


def _mask(prepared: Draft, constraint: Constraint) -> Mask:
    """What a constraint leaves of every decision that it speaks of."""
    formulation, found = prepared.formulation, {}
    alone = Constraints(items=(constraint,), held=False)
    labels = formulation.captured.output_tree.names
    outputs = {index: labels[int(key.split(".")[1])] for key, index in formulation.results.items()}
    for index, decision in enumerate(formulation.decisions):
        if decision.kind == "hub" or decision.node is None:
            continue
        own = outputs.get(index) or formulation.captured.names[decision.node]
        first = next((at for at, states in enumerate(decision.states) if states is not None), None)
        if first is not None and alone.key(own):
            found[index] = np.array([constraint.allows(s.outs[first] or ()) for s in decision.strategies])
    return found

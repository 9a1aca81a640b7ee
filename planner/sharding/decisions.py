"""What a sharding problem decides: classes of nodes with strategies, uses of tensors, and the problem they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import fx

from ...cost_models.prices import Prices
from ...passes.graph import Captured
from ...plans.meshes import Mesh
from ..solver.problem import Pair, Problem
from .accumulation import Accumulation
from .folding import Blocks
from .op_costs import Fusion
from .strategies import Strategy
from .transitions import Transitions, TransitionTable

__all__ = ["Decision", "Formulation", "Kind", "Reading"]

Kind = Literal["source", "tangent", "op", "hub", "output"]


@dataclass(slots=True, kw_only=True)
class Decision:
    """A class of nodes that share one choice. `states[k]` gives, per strategy, the layout index of output k in
    `tables[k]`; `seconds` the compute time of one member per strategy; `weight` how many nodes of the model it stands
    for."""

    kind: Kind
    pattern: str
    strategies: list[Strategy]
    tables: list[TransitionTable | None]
    states: list[np.ndarray | None]
    members: int = 0
    weight: float = 0.0
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    node: fx.Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Node `reader` takes output `output` of decision `source` as its tensor input `at`, perhaps by way of hub `via`.
    `early` readings are of parameters (or views and casts of them), which can be gathered ahead of their use: beside
    the compute of `behind`, the reader, or of a kept parameter its first reader."""

    source: int
    output: int
    via: int | None
    reader: int
    at: int
    node: fx.Node
    of: fx.Node
    backward: bool
    early: bool
    behind: int


@dataclass(slots=True, kw_only=True)
class Formulation:
    """The problem and how to read its solution. `of` maps a node to its decision; `readings` lists every use of a
    tensor, `grads` the reductions of gradients; `hidden` gives the seconds of communication behind compute that the
    problem leaves out."""

    captured: Captured
    mesh: Mesh
    prices: Prices
    transitions: Transitions
    decisions: list[Decision]
    of: dict[fx.Node, int]
    results: dict[str, int]
    readings: list[Reading]
    problem: Problem
    fusion: Fusion
    blocks: Blocks
    grads: list[Reading]
    hidden: dict[Pair, np.ndarray]
    accumulation: Accumulation = field(default_factory=Accumulation)
    _owners: dict[tuple[str, str], Decision] = field(default_factory=dict)

    def owner(self, decision: Decision) -> Decision:
        """Of the decisions on nodes that are equal up to block numbers, the one that most blocks follow."""
        if not self._owners:
            for rival in self.decisions:
                known = self._owners.get((rival.kind, rival.pattern))
                if known is None or rival.weight > known.weight:
                    self._owners[rival.kind, rival.pattern] = rival
        return self._owners[decision.kind, decision.pattern]

    def strategy(self, choices: Sequence[int], index: int) -> Strategy:
        """The chosen strategy of a decision."""
        return self.decisions[index].strategies[choices[index]]

"""Plans of one model for parts of a cluster, each solved once: what a replan needs, also made ahead of a failure.

Which of alike devices a plan is for does not matter to it. So a plan for seven of eight devices is there for whichever
of them is lost, and is found by its key in milliseconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import nn

from ...passes.graph import Captured
from ...passes.microbatches import first_rows, samples_of
from ...passes.recompute import Recompute
from ...plans.clusters import Cluster
from ...plans.errors import Infeasible
from ...plans.plan import DynamicDim, Options, Plan
from ..api import draft, plan_draft
from ..checking.check import default_loss
from ..fitting import within_rooms
from ..sharding.capturing import Traces
from ..sharding.folding import Blocks
from ..sharding.own_rules import OpRule
from ..stages.pipelined import Degrees, joined_draft, polished, solve_joined
from .choices import Choice, fitted

__all__ = ["Shelf", "Solved", "Solution"]

LossFunction = Callable[[Any], torch.Tensor]

# Seconds for the pipeline of a plan, at most, and as a share of the time there is.
_POLISH_S, _POLISH = 4.0, 0.1


class Shelf(Protocol):
    """Where solved plans are kept for other processes."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> None: ...


class Solution(Struct, frozen=True, kw_only=True):
    """What is known of a choice on healthy devices: its plan; or that it takes `bound_s` at least; or why there is
    none."""

    plan: bytes = b""
    bound_s: float = 0.0
    refused: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Solved:
    """Solved plans of `model` on inputs of the whole batch, and what their captures share."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]
    loss: LossFunction | None = None
    rules: Sequence[OpRule] = ()
    shelf: Shelf | None = None
    table: dict[str, Solution] = field(default_factory=dict)
    # Of how many samples the inputs are the first ones; 0: the whole batch.
    rows: int = 0
    _shares: dict[int, Solved] = field(default_factory=dict)
    _traces: Traces | None = None
    _captures: dict[tuple[int, Recompute], tuple[Captured, Blocks]] = field(default_factory=dict)

    def find(
        self, plan: Plan, choice: Choice, *, time_limit_s: float, better_than_s: float = math.inf
    ) -> Plan | Solution:
        """The plan of the request of `plan` on the devices of `choice`, as if they were healthy; or its bound, where
        that is not below `better_than_s`, or the reason why there is none."""
        key = _key(plan, choice, self.rows)
        known = self.table.get(key) or self._shelved(key)
        if known is None or not (known.plan or known.refused or known.bound_s >= better_than_s):
            known = self._solve(plan, choice, time_limit_s, better_than_s)
            self.table[key] = known
            if self.shelf is not None:
                self.shelf.put(key, msgspec.json.encode(known))
        return Plan.from_bytes(known.plan) if known.plan else known

    def of_rows(self, rows: int) -> Solved:
        """The same of the first `rows` samples of the batch."""
        if rows not in self._shares:
            args, kwargs = first_rows(self.args, self.kwargs, rows)
            self._shares[rows] = Solved(
                model=self.model, args=args, kwargs=kwargs, loss=self.loss, rules=self.rules, rows=rows,
                _captures=self._captures,
            )  # fmt: skip
        self._shares[rows].shelf = self.shelf
        return self._shares[rows]

    def _shelved(self, key: str) -> Solution | None:
        kept = None if self.shelf is None else self.shelf.get(key)
        if kept is None:
            return None
        found = self.table[key] = msgspec.json.decode(kept, type=Solution)
        return found

    def _solve(self, plan: Plan, choice: Choice, time_limit_s: float, better_than_s: float) -> Solution:
        solve = self._joined if plan.pipeline is not None else self._sharded
        try:
            found = solve(plan, choice, time_limit_s, better_than_s)
        except Infeasible as error:
            return Solution(refused=str(error))
        if not isinstance(found, Plan):
            return Solution(bound_s=found)
        # How long it took differs from process to process; the plan's digest must not.
        same = msgspec.structs.replace(found, solver=msgspec.structs.replace(found.solver, seconds=0.0))
        return Solution(plan=same.to_bytes())

    def _request(self, plan: Plan, choice: Choice) -> dict[str, Any]:
        options = plan.options
        return dict(
            cluster=choice.cluster(plan), constraints=fitted(options.constraints, choice.mesh),
            recipe=options.recipe or None, optimizer=options.optimizer, compiled=options.compiled,
            memory_limit_bytes=options.memory_limit_bytes, replicate=options.replicate, rules=self.rules,
            name=plan.model.name, dynamic=self._dynamic(options),
        )  # fmt: skip

    def _dynamic(self, options: Options) -> tuple[DynamicDim, ...] | None:
        """The dims that may change; a share of a small batch may be one sample."""
        if not self.rows:
            return options.dynamic or None
        return tuple(
            msgspec.structs.replace(one, smallest=1, step=1) if one.dim == 0 else one for one in options.dynamic
        ) or None  # fmt: skip

    def _sharded(self, plan: Plan, choice: Choice, time_limit_s: float, better_than_s: float) -> Plan | float:
        """The plan on one mesh; or a bound, before any memory is counted, that is no better than `better_than_s`."""
        request = {**self._request(plan, choice), "mesh": choice.mesh, "loss": self.loss}
        if self._traces is None:
            self._traces = Traces(self.model, self.args, self.kwargs, self.loss)
        call = self.model, self.args, self.kwargs
        if better_than_s < math.inf:
            first = draft(*call, recompute=_modes(plan.options)[0], traces=self._traces, **request)
            rooms = np.full(first.timeline.end + 1, math.inf)
            bound = within_rooms(first, rooms, time_limit_s).bound_s
            if bound >= better_than_s:
                return float(bound)
        mode = "auto" if len(_modes(plan.options)) > 1 else plan.options.recompute
        prepared, solution = plan_draft(
            *call, recompute=mode, time_limit_s=time_limit_s, traces=self._traces, **request
        )
        return prepared.write(solution)

    def _joined(self, plan: Plan, choice: Choice, time_limit_s: float, better_than_s: float) -> Plan | float:
        """The plan with a pipeline of as many micro-batches as before; or its bound."""
        assert plan.pipeline is not None
        degrees = Degrees(pipeline=choice.pipeline, mesh=choice.mesh, microbatches=plan.pipeline.microbatches)
        request = {**self._request(plan, choice), "loss": self.loss or default_loss}
        failed: Infeasible | None = None
        for mode in _modes(plan.options):
            # Shares of a batch are cut into micro-batches of one size.
            at = -(-samples_of(self.args, self.kwargs) // degrees.microbatches), mode
            prepared = joined_draft(
                self.model, self.args, self.kwargs, degrees, reduce=plan.pipeline.reduce_gradients,
                recompute=mode, known=self._captures.get(at), **request,
            )  # fmt: skip
            self._captures[at] = prepared.captured, prepared.blocks
            try:
                found = solve_joined(prepared, degrees, time_limit_s=time_limit_s, better_than_s=better_than_s)
            except Infeasible as error:
                failed = error
                continue
            if found is None:
                return better_than_s
            return polished(found, min(_POLISH_S, _POLISH * time_limit_s)).plan()
        assert failed is not None
        raise failed


def _modes(options: Options) -> tuple[Recompute, ...]:
    """How much may be computed again, the least first; without any where that was asked for."""
    return ("none",) if options.recompute == "none" else ("pointwise", "block")


def _key(plan: Plan, choice: Choice, rows: int) -> str:
    """Everything that decides which plan is found, in a digest."""
    options = msgspec.structs.replace(plan.options, recompute=_modes(plan.options)[0])
    pipeline = None if plan.pipeline is None else (plan.pipeline.microbatches, plan.pipeline.reduce_gradients)
    cluster: Cluster = choice.cluster(plan)
    what = (plan.model.digest, options, cluster, choice.mesh.shape, choice.mesh.axis_names, choice.pipeline, pipeline)
    what = (*what, rows) if rows else what
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()

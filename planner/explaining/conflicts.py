"""Why a request has no plan: the smallest set of its limits that conflict, and the nearest change that fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ...plans.conflict import Conflict
from ..api import draft
from ..arguments import check_arguments
from ..solver.least import costing
from .scenario import Found, Scenario

__all__ = ["explain_infeasible"]

LossFunction = Callable[[Any], torch.Tensor]

_NO_LIMIT = 2**60 - 1
# Bytes that stand for a second, and how near to each other the least limit and the proven one are brought.
_UNIT = float(2**30)
_FINE = 0.01
_MEMORY = -1


def explain_infeasible(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    recompute: str = "auto",
    time_limit_s: float = 30.0,
    **request: Any,
) -> Conflict:
    """Why `plan` with the same arguments raises Infeasible; all solves together take about `time_limit_s` seconds.

    Of the memory limit and the constraints a set is found that cannot be met, none of which can be spared; then which
    one to drop, or the least memory per device with which everything else can be kept. With `recompute` "auto" it is
    the mode that takes least memory, `block`. Raises what `plan` raises for a wrong request.
    """
    check_arguments(model=model, args=args, kwargs=kwargs, recompute=recompute, time_limit_s=time_limit_s, **request)
    mode: Any = "block" if recompute == "auto" else recompute
    request = {
        key: value for key, value in request.items() if key not in ("gap", "solver", "on_progress", "warm", "cache")
    }
    prepared = draft(model, args, kwargs, recompute=mode, held=False, **request)
    return _Conflicts(Scenario.of(prepared, time_limit_s=time_limit_s)).run()


class _Conflicts:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.sure = scenario, True
        self.items = [*range(len(scenario.constraints)), _MEMORY]

    def run(self) -> Conflict:
        """Delete what can be spared, then look for the nearest change."""
        if self._fits(self.items) is not False:
            return Conflict(limits=(), minimal=self.sure, drop=(), least_memory_bytes=None, proven_memory_bytes=None)
        kept = list(self.items)
        for item in self.items:
            rest = [other for other in kept if other != item]
            if self._fits(rest) is False:
                kept = rest
        minimal = self.sure
        drop = [item for item in kept if item != _MEMORY and self._fits([i for i in self.items if i != item])]
        least, proven = self._least_memory() if _MEMORY in kept else (None, None)
        return Conflict(
            limits=tuple(self._words(item) for item in kept),
            minimal=minimal,
            drop=tuple(self._words(item) for item in drop),
            least_memory_bytes=least,
            proven_memory_bytes=proven,
        )

    def _words(self, item: int) -> str:
        if item == _MEMORY:
            return f"memory limit of {self.scenario.open.limit} bytes per device"
        return f"constraint {self.scenario.constraints[item]}"

    def _fits(self, items: Collection[int]) -> bool | None:
        """Whether some plan meets `items`; None where time ran out."""
        without = [number for number in range(len(self.scenario.constraints)) if number not in items]
        found = self._solve(without, None if _MEMORY in items else _NO_LIMIT)
        if found.solution is None and not found.impossible:
            self.sure = False
            return None
        return found.solution is not None

    def _solve(self, without: Collection[int], limit: int | None, also: Sequence[Any] = ()) -> Found:
        prepared = self.scenario.draft(without=without, limit=limit, also=also, free=True)
        return self.scenario.solve(prepared, share=0.5)

    def _least_memory(self) -> tuple[int | None, int | None]:
        """The least limit in bytes with which a plan was found, all constraints kept, and the one that is proven to be
        too low, as estimated: within a percent of each other unless time runs out or the estimate is off."""
        timeline, low, best = self.scenario.open.timeline, self.scenario.open.limit, None
        moment = int(np.argmax(timeline.counts.sum(axis=0) * timeline.valid))
        for _ in range(3):
            found = self._smallest(moment)
            if found.solution is None:
                break
            profile = timeline.profile(found.solution.choices)
            best = min(best or _NO_LIMIT, _counted(found))
            low = max(low, int(found.solution.bound_s * _UNIT))
            if int(np.argmax(profile)) == moment:
                break
            moment = int(np.argmax(profile))
        while best is not None and best > low * (1 + _FINE) and self.scenario.left_s > 0:
            middle = (low + best) // 2
            found = self._solve((), middle)
            if found.solution is not None:
                best = min(best, _counted(found))
            elif found.impossible:
                low = middle
            else:
                break
        # What is proven is proven of the estimate; a plan that was counted may take less.
        return best, low if best is None else min(low, best)

    def _smallest(self, moment: int) -> Found:
        """The plan with the fewest bytes at `moment`: they take the place of seconds, in units of `_UNIT`."""
        prepared = self.scenario.draft(limit=_NO_LIMIT, free=True)
        row = self.scenario.open.timeline.row(moment, float(_NO_LIMIT))
        problem = costing(prepared.formulation.problem, row, _UNIT)
        if problem.nodes:
            # The seconds that are in it too are taken to be one at most.
            problem = replace(problem, nodes=(problem.nodes[0] - 1.0, *problem.nodes[1:]))
        prepared.formulation = replace(prepared.formulation, problem=problem)
        return self.scenario.solve(prepared, share=0.2, gap=1e-4)


def _counted(found: Found) -> int:
    """Bytes that the plan found takes."""
    assert found.solution is not None
    return found.draft.write(found.solution).predicted.memory.peak_bytes

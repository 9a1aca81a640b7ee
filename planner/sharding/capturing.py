"""A model captured for planning: of deep runs of equal blocks three repetitions, where these stand for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...passes.blocks import Run, repeated_blocks, with_fewer_blocks
from ...passes.capture import Trace
from ...passes.graph import Captured
from ...passes.recompute import Recompute
from ...plans.errors import CaptureError
from .constraints import Constraints
from .faithful import stands_for_all
from .folding import CAPTURED, Blocks

__all__ = ["Traces", "captured_by_blocks"]


class Traces:
    """Traces of one model on one call, by which of its runs were cut: captures with another recomputation start from
    the same one."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        self.model, self.runs = model, repeated_blocks(model)
        self._call = (args, kwargs, loss)
        self._made: dict[frozenset[Run], Trace | CaptureError] = {}

    def of(self, cut: frozenset[Run]) -> Trace:
        """The trace of the model with `cut` runs by three repetitions; CaptureError as for `capture`."""
        if cut not in self._made:
            args, kwargs, loss = self._call
            try:
                model = with_fewer_blocks(self.model, cut) if cut else self.model
                self._made[cut] = Trace.of(model, args, kwargs, loss=loss)
            except CaptureError as error:
                self._made[cut] = error
        found = self._made[cut]
        if isinstance(found, CaptureError):
            raise found
        return found


def captured_by_blocks(traces: Traces, limits: Constraints, mode: Recompute, *, whole: bool) -> tuple[Captured, Blocks]:
    """The captured model, and its runs of equal blocks with those that were cut. `whole` cuts none.

    A run is cut where three of its repetitions stand for all, and no constraint of `limits` speaks of some of its
    blocks only.
    """
    runs = traces.runs
    deep = frozenset() if whole else frozenset(run for run in runs if run.count > CAPTURED)
    while deep:
        blocks = Blocks(runs=runs, cut=deep)
        try:
            captured = traces.of(deep).repeated(mode)
        except CaptureError:
            break  # a model that needs all its blocks is captured whole, which raises again if that was not the reason
        kept = {run for run in deep if stands_for_all(captured, blocks, run) and _alike(captured, run, limits)}
        if kept == deep:
            return captured, blocks
        deep = frozenset(kept)
    return traces.of(frozenset()).repeated(mode), Blocks(runs=runs)


def _alike(captured: Captured, run: Run, limits: Constraints) -> bool:
    """Whether each constraint speaks of all blocks of a kind or of none."""
    if not limits.items:
        return True
    places = {name: run.place(name) for name in captured.names.values()}
    stamps = {name: place[1] for name, place in places.items() if place is not None and place[0] == 0}
    return all(limits.alike([stamp.put(name, n) for n in stamp.numbers]) for name, stamp in stamps.items())

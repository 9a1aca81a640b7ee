"""A running model meets inputs of other sizes: it is captured again, and the plan must hold for that too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..plans.errors import ReplayError, RequestError
from ..plans.plan import Plan
from .capture import capture
from .graph import Captured

__all__ = ["Recapture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recapture:
    """How a model that runs by `plan` is captured: `skeleton` is it on the meta device, `again` what is computed again,
    `sound` raises where the plan's layouts do not hold for a capture."""

    skeleton: nn.Module
    plan: Plan
    loss: Callable[[Any], torch.Tensor] | None
    again: frozenset[str]
    sound: Callable[[Captured], None] | None

    def __call__(self, args: tuple, kwargs: dict[str, Any], training: bool, add: Callable[[Captured], Any]) -> Any:
        """What `add` makes of the capture for these inputs; ReplayError where it is not one that the plan can split."""
        if self.skeleton.training != training:
            self.skeleton.train(training)
        mode = self.plan.options.recompute
        try:
            captured = capture(self.skeleton, args, kwargs, loss=self.loss, recompute=mode, again=self.again)
            if self.sound is not None:
                self.sound(captured)
            return add(captured)
        except (ReplayError, RequestError) as error:
            raise ReplayError(
                f"'inputs' must have shapes that the plan can split, got others than it was made for: {error}"
            ) from error

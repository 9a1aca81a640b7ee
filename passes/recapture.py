"""A running model meets inputs of other sizes: it is captured again, and the plan must hold for that too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..plans.errors import CaptureError, ReplayError, RequestError
from ..plans.plan import Plan
from .capture import capture
from .graph import Captured
from .signature import Signature

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

    def __call__(
        self, args: tuple, kwargs: dict[str, Any], now: Signature, before: Signature, add: Callable[[Captured], Any]
    ) -> Any:
        """What `add` makes of the capture for a call like `now`; ReplayError, with what has changed since `before`,
        where it is not one that the plan can split."""
        modes = dict(now.modes)
        for path, module in self.skeleton.named_modules():
            module.training = modes.get(path, module.training)
        mode = self.plan.options.recompute
        try:
            captured = capture(self.skeleton, args, kwargs, loss=self.loss, recompute=mode, again=self.again)
            if self.sound is not None:
                self.sound(captured)
            return add(captured)
        except (ReplayError, RequestError, CaptureError) as error:
            raise ReplayError(
                f"'inputs' must give a program that the plan can split, got a call with {now.changed(before)}: {error}"
            ) from error

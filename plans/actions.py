"""Actions of a pipeline schedule: what one rank does to one stage for one micro-batch.

F forward, B full backward, I input gradient, W weight gradient, SEND_F, RECV_F, SEND_B, RECV_B the communications,
UNSHARD, RESHARD, REDUCE_GRAD what a stage does once. The text form is that of torch.distributed.pipelining: '2F0' is
the forward of stage 2 for micro-batch 0, '1REDUCE_GRAD' has no micro-batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import RequestError

__all__ = ["ACTION_KINDS", "COMPUTE_KINDS", "Action", "TimedAction", "parse_action"]

COMPUTE_KINDS = ("F", "I", "W", "B")
_PASSING = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ONCE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
ACTION_KINDS = (*COMPUTE_KINDS, *_PASSING, *_ONCE)
_FORM = re.compile(rf"(\d{{1,6}})({'|'.join(sorted(ACTION_KINDS, key=len, reverse=True))})(\d{{0,7}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One action: its stage, its kind and, but for what a stage does once, its micro-batch."""

    stage: int
    kind: str
    microbatch: int | None = None

    @property
    def is_compute(self) -> bool:
        """Whether it occupies the rank with arithmetic (F, I, W or B)."""
        return self.kind in COMPUTE_KINDS

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end, in the unit of the costs it was simulated with."""

    action: Action
    start: float
    end: float


def parse_action(text: str) -> Action:
    """The action that `text` writes, e.g. '2F0'; RequestError otherwise."""
    match = _FORM.fullmatch(text)
    if match is None or (match.group(2) in _ONCE) == bool(match.group(3)):
        raise RequestError(
            f"'action' must be a stage, one of {', '.join(ACTION_KINDS)} and a micro-batch, got {text[:60]!r}"
        )
    return Action(int(match.group(1)), match.group(2), int(match.group(3)) if match.group(3) else None)

"""Optimizers: what their state and their step take, per byte of the parameters they train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...plans.errors import RequestError

__all__ = ["OPTIMIZERS", "Optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """`passes` over parameter-sized memory of one update; `states` kept between updates, in sizes of the parameter.

    `together` is what an update of all parameters at once makes for a moment, in sizes of all of them, as the foreach
    implementations do, which are the default on GPUs; `each` what an update one by one makes, in sizes of the largest
    (torch/optim/adam.py, sgd.py). `counts` says whether each parameter has a step count, a float32 on the CPU.
    """

    passes: float
    states: int
    together: int
    each: int
    counts: bool

    @classmethod
    def of(cls, name: str) -> Optimizer:
        """The optimizer that a request calls `name`."""
        if name not in OPTIMIZERS:
            raise RequestError(f"'optimizer' must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
        return OPTIMIZERS[name]

    def scratch(self, device: str) -> int:
        """What an update makes for a moment on `device`, in sizes of all parameters, where that counts."""
        return self.together if device != "cpu" else 0


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(passes=7.0, states=2, together=1, each=2, counts=True),
    "adam": Optimizer(passes=7.0, states=2, together=1, each=2, counts=True),
    "sgd": Optimizer(passes=3.0, states=0, together=0, each=0, counts=False),
    "sgd-momentum": Optimizer(passes=5.0, states=1, together=0, each=0, counts=False),
    "none": Optimizer(passes=0.0, states=0, together=0, each=0, counts=False),
}

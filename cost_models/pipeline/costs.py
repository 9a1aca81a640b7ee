"""What the stages of a pipeline cost: times in one unit (seconds, or a profile's own), memory in one unit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...plans import RequestError

__all__ = ["StageCosts"]

_PER_STAGE = (
    "forward",
    "input_gradient",
    "weight_gradient",
    "memory_forward",
    "memory_input_gradient",
    "memory_weight_gradient",
    "gather",
    "reduce",
    "finish",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs per stage, each a tuple with one entry per stage; empty tuples get their defaults.

    forward, input_gradient, weight_gradient: time of F, I and W; B takes I and W together.
    memory_*: what F, I and W add to the activations of their rank, by default +2, -1, -1 (B adds the sum of I and W).
    delay, boundary_bytes / bandwidth: time from the end of an action until its tensor is at another rank.
    overhead: added to every compute action. overlap: transfers cost no compute time. blocking: a receive holds its rank
    until the tensor is there. microbatch_scale: factor on the time of each micro-batch.
    gather, reduce: time of UNSHARD and REDUCE_GRAD. finish: time after a rank's last action, summed over its stages
    (gradient reduction that nothing hides, optimizer).
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    memory_forward: tuple[float, ...] = ()
    memory_input_gradient: tuple[float, ...] = ()
    memory_weight_gradient: tuple[float, ...] = ()
    gather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    finish: tuple[float, ...] = ()
    delay: float = 0.0
    boundary_bytes: tuple[float, ...] = ()
    bandwidth: float = math.inf
    overhead: float = 0.0
    overlap: bool = True
    blocking: bool = False
    microbatch_scale: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        """How many stages have a cost."""
        return len(self.forward)

    @classmethod
    def equal(
        cls, stages: int, forward: float, input_gradient: float, weight_gradient: float, delay: float = 0.0
    ) -> StageCosts:
        """`stages` stages of the same cost."""
        parts = ((value,) * stages for value in (forward, input_gradient, weight_gradient))
        first, second, third = parts
        return cls(forward=first, input_gradient=second, weight_gradient=third, delay=delay).complete()

    def complete(self) -> StageCosts:
        """The same with its defaults written out; RequestError where an entry is missing, negative or no number."""
        stages = self.stages
        defaults = {"memory_forward": 2.0, "memory_input_gradient": -1.0, "memory_weight_gradient": -1.0}
        full = {name: getattr(self, name) or (defaults.get(name, 0.0),) * stages for name in _PER_STAGE}
        full["boundary_bytes"] = self.boundary_bytes or (0.0,) * max(stages - 1, 0)
        lengths = {name: stages for name in _PER_STAGE} | {"boundary_bytes": max(stages - 1, 0)}
        for name, values in full.items():
            if len(values) != lengths[name]:
                raise RequestError(f"'{name}' must have {lengths[name]} entries, one per stage, got {len(values)}")
            _check_numbers(name, values, signed=name.startswith("memory"))
        _check_numbers("delay, overhead", (self.delay, self.overhead))
        _check_numbers("microbatch_scale", self.microbatch_scale)
        if not self.bandwidth > 0:
            raise RequestError(f"'bandwidth' must be positive, got {self.bandwidth}")
        return replace(self, **full)

    def transfer(self, boundary: int) -> float:
        """Time of the tensor between stages `boundary` and `boundary` + 1, if they are on different ranks."""
        return self.delay + self.boundary_bytes[boundary] / self.bandwidth

    def duration(self, kind: str, stage: int, microbatch: int | None = None) -> float:
        """Time that an action of this kind holds the arithmetic (or, for UNSHARD and REDUCE_GRAD, its own line)."""
        scale = self.microbatch_scale[microbatch] if self.microbatch_scale and microbatch is not None else 1.0
        if kind == "F":
            return self.forward[stage] * scale + self.overhead
        if kind == "I":
            return self.input_gradient[stage] * scale + self.overhead
        if kind == "W":
            return self.weight_gradient[stage] * scale + self.overhead
        if kind == "B":
            return (self.input_gradient[stage] + self.weight_gradient[stage]) * scale + self.overhead
        return (
            {"UNSHARD": self.gather, "REDUCE_GRAD": self.reduce}[kind][stage]
            if kind in ("UNSHARD", "REDUCE_GRAD")
            else 0.0
        )

    def memory(self, kind: str, stage: int) -> float:
        """What an action adds to the memory of its rank: before it runs if positive, after it if negative."""
        if kind == "F":
            return self.memory_forward[stage]
        if kind == "I":
            return self.memory_input_gradient[stage]
        if kind == "W":
            return self.memory_weight_gradient[stage]
        return self.memory_input_gradient[stage] + self.memory_weight_gradient[stage] if kind == "B" else 0.0


def _check_numbers(name: str, values: Iterable[float], *, signed: bool = False) -> None:
    for value in values:
        if not math.isfinite(value) or (value < 0 and not signed):
            raise RequestError(f"'{name}' must hold finite numbers{'' if signed else ' of at least 0'}, got {value}")

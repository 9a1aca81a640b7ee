"""A job as replanning sees it: layers with times and bytes, degrees of parallelism, and devices with speeds.

It needs no model and no program: a layer profile, published figures or a plan's predictions fill it alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...plans import Health, RequestError

__all__ = ["Job", "Speeds"]


class Speeds(list[float]):
    """Speeds of all devices. `kinds`: of groups that were asked for, their size and slowest member, kept for speed."""

    def __init__(self, speeds: Iterable[float]) -> None:
        super().__init__(speeds)
        self.kinds: dict[tuple[int, ...], tuple[int, float]] = {}


@dataclass(frozen=True, slots=False, kw_only=True)
class Job:
    """`replicas` pipelines of `stages` groups of `tensor` devices, `microbatches` in all over them in one step.

    forward_s, backward_s: per layer, computation for one micro-batch on a healthy group of `tensor` devices; on k
    devices of speed p it takes tensor / (k p) times as long. collective_bytes: what a layer's forward, and again its
    backward, reduces over its group. state_bytes: parameters, gradients and optimizer state of a whole layer;
    gradient_bytes: what replicas reduce of it; activation_bytes: what a layer holds of one micro-batch; all are shared
    by the group.
    Devices are numbered node by node; the healthy job takes them in the order replica, stage, member. Those behind are
    spare. degrees: how many devices a group may have. groups stay within a node.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    tensor: int
    stages: int
    replicas: int
    microbatches: int
    devices: int
    devices_per_node: int
    degrees: tuple[int, ...]
    state_bytes: tuple[float, ...] = ()
    gradient_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    collective_bytes: tuple[float, ...] = ()
    layers_per_stage: tuple[int, ...] = ()
    memory_bytes: float = math.inf
    intra_bytes_per_s: float = math.inf
    inter_bytes_per_s: float = math.inf
    storage_bytes_per_s: float = math.inf
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        layers = len(self.forward_s)
        for name in ("state_bytes", "gradient_bytes", "activation_bytes", "collective_bytes"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * layers)
        for name in ("backward_s", "state_bytes", "gradient_bytes", "activation_bytes", "collective_bytes"):
            values = getattr(self, name)
            _require(len(values) == layers, name, f"have one entry for each of {layers} layers", len(values))
            _require(all(0 <= v < math.inf for v in values), name, "be finite and at least 0", values)
        _require(
            layers > 0 and all(0 < v < math.inf for v in self.forward_s), "forward_s", "be above 0", self.forward_s
        )
        for name in ("tensor", "stages", "replicas", "microbatches", "devices", "devices_per_node"):
            _require(isinstance(getattr(self, name), int) and getattr(self, name) >= 1, name, "be 1 or more",
                     getattr(self, name))  # fmt: skip
        _require(self.stages <= layers, "stages", f"be at most the {layers} layers", self.stages)
        used = self.tensor * self.stages * self.replicas
        _require(used <= self.devices, "devices", f"be at least the {used} that the job takes", self.devices)
        _require(self.devices_per_node % self.tensor == 0, "tensor", "divide the devices of a node", self.tensor)
        _require(self.tensor in self.degrees, "degrees", f"have the degree of the job, {self.tensor}", self.degrees)
        _require(sorted(set(self.degrees)) == list(self.degrees) and self.degrees[0] >= 1, "degrees",
                 "ascend from 1 or more", self.degrees)  # fmt: skip
        if not self.layers_per_stage:
            object.__setattr__(self, "layers_per_stage", equal_layers(layers, self.stages))
        _require(
            len(self.layers_per_stage) == self.stages and sum(self.layers_per_stage) == layers
            and min(self.layers_per_stage) >= 1,
            "layers_per_stage", f"have {self.stages} counts that sum to {layers}", self.layers_per_stage,
        )  # fmt: skip

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.forward_s)

    @property
    def work_s(self) -> float:
        """Seconds that one healthy device needs to compute one micro-batch, forward and backward."""
        return (math.fsum(self.forward_s) + math.fsum(self.backward_s)) * self.tensor

    @cached_property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """Before each layer and at the end: forward and backward seconds, state, gradient, activation, collectives."""
        rows = (
            self.forward_s, self.backward_s, self.state_bytes, self.gradient_bytes, self.activation_bytes,
            self.collective_bytes,
        )  # fmt: skip
        return tuple(tuple(itertools.accumulate(row, initial=0.0)) for row in rows)

    def node(self, device: int) -> int:
        """The node that a device is in."""
        return device // self.devices_per_node

    def place(self, replica: int, stage: int) -> tuple[int, ...]:
        """The devices of a group of the healthy job."""
        first = (replica * self.stages + stage) * self.tensor
        return tuple(range(first, first + self.tensor))

    def speeds(self, health: Health) -> Speeds:
        """The speed of every device."""
        speeds = Speeds([1.0] * self.devices)
        for device, speed in Health.of(health, self.devices).speeds:
            speeds[device] = speed
        return speeds


def equal_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Equal layers per stage, the first stages one more where it does not divide."""
    size, more = divmod(layers, stages)
    return tuple(size + (stage < more) for stage in range(stages))


def _require(holds: bool, name: str, rule: str, value: Sequence | object) -> None:
    if not holds:
        raise RequestError(f"job '{name}' must {rule}, got {str(value)[:120]}")

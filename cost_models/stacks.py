"""What a software stack adds to kernels and links, read strictly from `stacks.toml`."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..plans.errors import RequestError
from .devices import Device

__all__ = ["Family", "Stack", "find_stack", "load_stacks", "read_stacks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Matrix products of one library and precision on one architecture.

    `slowdown` is the time against `kernels.gemm_s`, which is fitted to the best shapes found in short runs: clocks
    under sustained load, layouts, kernels that are not the best. `cast_accesses` are passes over the operands to cast
    them; `dtype` is that of the device's sheet whose peak is reached (four bits: a slowdown below 1 against float8).
    """

    dtype: str
    slowdown: float
    cast_accesses: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training framework with its usual settings.

    `eager` and `fused` are elementwise traffic against what `elementwise` counts, without and with a compiler or fused
    kernels;
    `launch_s` and `compiled_launch_s` the host's seconds per kernel; the `*_exposed` shares of communication that is
    not hidden; `contention` how much slower compute is while weights or gradients are under way, `prefetch`
    how many layers ahead weights are gathered, `bucket_bytes` how much of gradients is sent at once where weights are
    not sharded; `weight_traffic_bytes` what a micro-batch moves per weight beside products (gradients added up, copies
    into and out of what is sent); `straggling` what a step takes longer each time the nodes double,
    `sharded_straggling` where all wait for all at every layer; `elementwise` bytes per element of elementwise ops,
    'eager' and 'fused'; `defaults` what its recipes use where a row does not say.
    """

    name: str
    match: str
    source: str
    families: Mapping[str, Family]
    architectures: Mapping[str, str]
    elementwise: Mapping[str, Mapping[str, float]]
    gemm: Mapping[str, str]
    attention: Mapping[str, str]
    attention_slow: Mapping[str, float]
    defaults: Mapping[str, Any]
    eager: float
    fused: float
    selective_attention: float
    selective_moved: float
    launch_s: float
    compiled_launch_s: float
    loss_bytes: float
    loss_saved_bytes: float
    permute_accesses: float
    biased_accesses: float
    mamba_accesses: float
    expert_kernels: float
    tp_exposed: float
    async_tp: float
    cp_exposed: float
    cp_imbalance: float
    ep_exposed: float
    pp_exposed: float
    contention: float
    prefetch: int
    weight_traffic_bytes: float
    bucket_bytes: float
    gradient_bytes: float
    parameter_bytes: float
    balanced_ends: float
    straggling: float
    sharded_straggling: float
    sends_once_per_node: bool
    selective_saved: float
    stages_outermost: bool
    masked_flops: bool
    step_fixed_s: float

    def family(self, device: str, precision: str) -> Family:
        """The products of `precision` on `device`; RequestError where the stack has none."""
        key = f"{self.architectures.get(device, 'any')}-{precision}"
        named = self.gemm.get(key, key)
        named = named if named in self.families else f"any-{precision}"
        if named not in self.families:
            raise RequestError(
                f"'precision' must be one that {self.name} has on {device}, got {precision!r}; see stacks.toml"
            )
        return self.families[named]

    def attention_kernel(self, device: Device) -> str | None:
        """The name of the kernel in the device's sheet, None for its first."""
        name = self.attention.get(self.architectures.get(device.name, "any"))
        return name if name in {kernel.name for kernel in device.attention} else None

    def attention_slowdown(self, device: str) -> float:
        """The time of attention against the sheet's kernel."""
        return self.attention_slow.get(self.architectures.get(device, "any"), 1.0)

    def exposed(self, role: str) -> float:
        """The share of a role's communication ('tp', 'cp', 'ep', 'pp') that is not hidden."""
        return float(getattr(self, f"{role}_exposed"))


def load_stacks(text: str | None = None) -> tuple[Stack, ...]:
    """The stacks in `text`, or the shipped ones; RequestError names the key that is missing or unknown."""
    if text is None:
        folder = resources.files(__package__ or "meshwright.cost_models")
        text = (folder / "stacks.toml").read_text(encoding="utf-8")
    return read_stacks(tomllib.loads(text))


def read_stacks(table: Mapping[str, Any]) -> tuple[Stack, ...]:
    """The stacks of a parsed `stacks.toml`; RequestError as for `load_stacks`."""
    families = {name: Family(dtype=row["dtype"], slowdown=row["slowdown"], cast_accesses=row["cast_accesses"])
                for name, row in table["family"].items()}  # fmt: skip
    shared = {"families": families, "architectures": table["architecture"], "elementwise": table["elementwise"]}
    known = {f.name for f in dataclasses.fields(Stack)} - set(shared)
    stacks: list[Stack] = []
    for entry in table["stack"]:
        row = {**table["common"], **entry}
        if set(row) != known:
            wrong = sorted(set(row) ^ known)
            raise RequestError(
                f"'stack' must have the keys of Stack, got {wrong} unknown or missing; correct stacks.toml"
            )
        stacks.append(Stack(**row, **shared))
    return tuple(stacks)


def find_stack(stacks: tuple[Stack, ...], name: str) -> Stack:
    """The first stack whose `match` is found in `name`; the last one is that of software that is not known."""
    return next(stack for stack in stacks if re.search(stack.match, name, re.IGNORECASE))

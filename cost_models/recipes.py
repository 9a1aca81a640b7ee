"""Step time of a training recipe, from the model's shape, the machine, the software stack and the parallel degrees.

A pure function for recipes that no program was captured of: published rows and quick what-ifs. Kernels and
collectives have the prices that plans are made with; what a stack adds to them (how it fuses, what it hides, how long
its host takes) stands in `stacks.toml`. Times are seconds of one optimizer step.

One micro-batch passes a stage in `forward + backward`; 1F1B of `m` micro-batches over `p` stages, each in `v` chunks,
takes (m + (p - 1) / v) of those of the slowest stage; gradients, gathers and the optimizer come on top as far as not
hidden.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ..plans.errors import RequestError
from .collectives import axis_collective_s
from .devices import Device
from .kernels import attention_s, gemm_s, memory_s
from .recipe_data import data_s, group_axis
from .recipe_layers import Block, model_blocks
from .stacks import Stack
from .systems import System
from .transformers import Transformer

__all__ = ["Recipe", "StepPrice", "recipe_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one step is split: degrees, batch, precision and what is recomputed.

    `shard` is 'none' (every replica whole), 'optimizer' (ZeRO-1), 'gradients' (ZeRO-2) or 'full' (ZeRO-3, FSDP) over
    the data-parallel devices; `recompute` is 'none', 'selective' or 'full'; `precision` a family of stacks.toml such as
    'bf16', 'fp8', 'mxfp8' or 'nvfp4'; `virtual` counts model chunks per stage; `async_tp` overlaps tensor-parallel
    collectives with products where the stack can; with a `shard_group` weights are sharded over so many devices and
    whole replicas of that are kept (HSDP). `prefetch` and `bucket_bytes` replace the stack's: how many layers ahead
    weights are gathered, and how much of gradients is sent at once.
    """

    devices: int
    seq_len: int
    micro_batch: int
    global_batch: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    virtual: int = 1
    precision: str = "bf16"
    recompute: str = "none"
    shard: str = "optimizer"
    sequence_parallel: bool = True
    async_tp: bool = False
    compiled: bool = False
    skip_mtp: bool = False
    micro_batches: int = 0
    shard_group: int = 0
    prefetch: int | None = None
    bucket_bytes: float | None = None

    def __post_init__(self) -> None:
        split = self.tp * self.pp * self.cp
        if self.devices % split:
            raise RequestError(
                f"'devices' must be a multiple of tp x pp x cp = {split}, got {self.devices}; see the row"
            )
        if self.global_batch % self.dp:
            raise RequestError(
                f"'global_batch' must be a multiple of dp = {self.dp}, got {self.global_batch}; see the row"
            )

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return self.devices // (self.tp * self.pp * self.cp)

    @property
    def steps(self) -> int:
        """Micro-batches of one replica in one optimizer step."""
        return self.micro_batches or max(1, math.ceil(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one device."""
        return self.global_batch / self.dp / self.steps * self.seq_len / self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """Seconds of one step and what they consist of; the terms add up to the step."""

    step_s: float
    terms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Forward and backward seconds of one block: on the device, in exposed communication, on the host."""

    compute_s: np.ndarray
    exposed_s: np.ndarray
    host_s: np.ndarray

    def total(self) -> np.ndarray:
        return np.maximum(self.compute_s + self.exposed_s, self.host_s)


def recipe_step(model: Transformer, recipe: Recipe, system: System, stack: Stack) -> StepPrice:
    """Seconds of one optimizer step of `recipe`; RequestError where the degrees do not fit the model."""
    if recipe.devices < system.devices_per_node and system.device.intra_link.torus_dims:  # a slice of a pod
        system = dataclasses.replace(system, devices_per_node=recipe.devices)
    blocks, ends = model_blocks(model, recipe, stack, system.devices_per_node)
    costs = [(block, _block_costs(block, recipe, system, stack)) for block in blocks]
    end_costs = [(block, _block_costs(block, recipe, system, stack)) for block in ends]
    share = 1.0 / recipe.pp
    parts = {"compute": 0.0, "exposed": 0.0, "host": 0.0}
    for block, cost in costs:
        _add(parts, cost, block.count * share)
    stage_s = sum(parts.values())
    stage = share * np.sum([block.count * cost.total() for block, cost in costs], axis=0)
    ends_pass = np.sum([block.count * cost.total() for block, cost in end_costs], axis=0)
    ends_s = float(ends_pass.sum())
    if recipe.pp == 1:
        for block, cost in end_costs:
            _add(parts, cost, block.count)
        slowest_s = stage_s + ends_s
    else:  # the cut gives the stage with the loss fewer layers, as far as the stack does so
        slowest_s = stage_s + ends_s * (1.0 - stack.balanced_ends * (1.0 - 1.0 / recipe.pp))
        parts["imbalance"] = slowest_s - stage_s
    transfer_s = _transfer_s(model, recipe, system, stack)
    passes = recipe.steps + (recipe.pp - 1) / recipe.virtual
    terms = {name: seconds * recipe.steps for name, seconds in parts.items()}
    terms["transfer"] = transfer_s * recipe.steps
    terms["bubble"] = (passes - recipe.steps) * (slowest_s + transfer_s)
    exposed, slowed = data_s(model, recipe, system, stack, blocks, stage, ends_pass)
    terms |= {"data exposed": float(exposed), "data slows": float(slowed)}
    terms["optimizer"] = _optimizer_s(model, recipe, system)
    terms["fixed"] = stack.step_fixed_s
    nodes = max(1.0, recipe.devices / system.devices_per_node)
    straggling = stack.sharded_straggling if recipe.shard == "full" else stack.straggling
    terms["stragglers"] = sum(terms.values()) * straggling * math.log2(nodes)
    return StepPrice(step_s=sum(terms.values()), terms=tuple(terms.items()))


def _add(parts: dict[str, float], cost: _Costs, count: float) -> None:
    compute, exposed = float(cost.compute_s.sum()), float(cost.exposed_s.sum())
    parts["compute"] += count * compute
    parts["exposed"] += count * exposed
    parts["host"] += count * (float(cost.total().sum()) - compute - exposed)


def _block_costs(block: Block, recipe: Recipe, system: System, stack: Stack) -> _Costs:
    """Forward and backward of one block, recomputation in the backward."""
    device = system.device
    family = stack.family(device.name, recipe.precision)
    wide = 2.0 if family.dtype in ("float32", "tf32") else 1.0  # against the 16 bits that bytes are counted in
    products = np.zeros(2)
    for dtype, slow, rows in (
        (family.dtype, family.slowdown, [p for p in block.products if p.low_precision]),
        ("bfloat16", stack.family(device.name, "bf16").slowdown, [p for p in block.products if not p.low_precision]),
    ):
        if not rows:
            continue
        dtype = _sixteen_bits(device) if dtype == "bfloat16" else dtype
        m, n, k, b = (np.array([getattr(p, name) for p in rows], float) for name in ("m", "n", "k", "batch"))
        forward = gemm_s(device, m, n, k, batch=b, dtype=dtype)
        inputs, weights = gemm_s(device, m, k, n, batch=b, dtype=dtype), gemm_s(device, n, k, m, batch=b, dtype=dtype)
        products += slow * np.array([forward.sum(), inputs.sum() + weights.sum()])
    attention = np.zeros(2)
    if block.attention is not None:
        shape = block.attention
        dtype = family.dtype if wide > 1 else _sixteen_bits(device)
        kernel = stack.attention_kernel(device)
        slow = stack.attention_slowdown(device.name) * (1.0 + stack.cp_imbalance * (1.0 - 1.0 / recipe.cp))
        attention = block.attention_count * slow * np.array(
            [attention_s(device, *shape, dtype=dtype, kernel=kernel, backward=backward) for backward in (False, True)]
        )  # fmt: skip
        if block.window_shape is not None:
            local = np.array([attention_s(device, *block.window_shape, dtype=dtype, kernel=kernel, causal=False,
                                          backward=backward) for backward in (False, True)])  # fmt: skip
            attention = (attention + local) / 2.0
    moved = (stack.fused if recipe.compiled else stack.eager) * np.array([1.0, 2.0]) * block.moved_bytes
    moved = moved + block.fixed_bytes * np.array([1.0, 1.0])
    if family.dtype == "float8":
        moved = moved + family.cast_accesses * np.array([1.0, 2.0]) * block.cast_bytes
    moved[1] += stack.weight_traffic_bytes * (block.parameters + block.expert_parameters)
    moved = wide * moved
    compute = products + attention + moved / device.memory_rate_bytes_per_s
    exposed = np.zeros(2)
    for part in block.collectives:
        axis = group_axis(system, part.members, part.stride)
        seconds = float(axis_collective_s(part.kind, wide * part.size_bytes, axis)) * part.count
        share = stack.async_tp if part.role == "tp" and recipe.async_tp else stack.exposed(part.role)
        exposed += np.array([part.forward, part.backward]) * seconds * share
    launch = block.kernels * (stack.compiled_launch_s if recipe.compiled else stack.launch_s)
    host = np.array([launch, 2.0 * launch])
    if recipe.recompute == "full" and block.repeats:
        repeat = np.array([0.0, compute[0] + exposed[0]])
        return _Costs(compute_s=compute + repeat, exposed_s=exposed, host_s=host + np.array([0.0, launch]))
    if recipe.recompute == "selective" and block.repeats:
        repeated = stack.selective_moved * moved[0] / device.memory_rate_bytes_per_s
        compute = compute + np.array([0.0, stack.selective_attention * attention[0] + repeated])
    return _Costs(compute_s=compute, exposed_s=exposed, host_s=host)


def _sixteen_bits(device: Device) -> str:
    return "bfloat16" if "bfloat16" in dict(device.peaks_flops_per_s) else "float16"


def _transfer_s(model: Transformer, recipe: Recipe, system: System, stack: Stack) -> float:
    """Exposed seconds of the activations and gradients that one micro-batch hands from stage to stage."""
    if recipe.pp == 1:
        return 0.0
    size = recipe.tokens * model.hidden * 2.0 / (recipe.tp if recipe.sequence_parallel else 1)
    axis = group_axis(system, 2, recipe.tp * recipe.cp * max(1, recipe.dp if stack.stages_outermost else 1))
    return 2.0 * recipe.virtual * float(axis_collective_s("point_to_point", size, axis)) * stack.exposed("pp")


def _optimizer_s(model: Transformer, recipe: Recipe, system: System) -> float:
    """Adam's reads and writes of what one device holds."""
    held = model.parameters() / (recipe.tp * recipe.pp)
    if model.is_moe:
        experts = model.moe_layers * model.expert_parameters()
        held = (model.parameters() - experts) / (recipe.tp * recipe.pp) + experts / (recipe.pp * recipe.ep)
    held /= recipe.dp * recipe.cp if recipe.shard != "none" else 1
    return float(memory_s(system.device, 30.0 * held))

"""Times of single kernels on one device, from their shapes. Numbers or numpy arrays in (broadcast), the same out.

All times are seconds on the device, without the host's launch: the caller adds `launch_overhead_s` once per kernel it
would launch. A kernel of no work takes 0 s. Sources of the constants: the device's sheet.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..plans.errors import RequestError
from .devices import Attention, Device

__all__ = ["attention_flops", "attention_s", "gemm_s", "item_bytes", "memory_s"]

Numbers: TypeAlias = int | float | npt.NDArray[np.integer] | npt.NDArray[np.floating]
Times: TypeAlias = (
    Any  # a float when every argument is a number, else a float64 array; typed like numpy's own functions
)

# Output tiles that libraries choose from, as (share of tile_m, share of tile_n, share of the large tile's speed):
# smaller tiles read their operands more often. The fastest is taken, as cuBLAS's heuristic would.
_TILES = ((1.0, 1.0, 1.0), (1.0, 0.75, 0.98), (1.0, 0.5, 0.95), (0.5, 0.5, 0.85), (0.5, 0.25, 0.65))
_SPLITS = (1, 2, 4, 8)  # split-K: units share one output tile and add their terms through memory
_K_FILL_TILES = 1.0  # reading the first operands and writing the tile costs about this many tiles along k
_ATTENTION_TILE = 128  # query rows of one work item, and the block a causal mask cuts in half
_ATTENTION_LEAST_ROWS = 64.0  # a work item with fewer queries is padded to this
_ATTENTION_SPLIT_KEYS = 512.0  # the longest run of keys in one work item when units would be idle otherwise
_ATTENTION_BACKWARD_KERNELS = 3.0  # row sums, the main kernel, conversion of the query gradient
_HEAD_DIMS = (16.0, 32.0, 64.0, 128.0, 256.0)
_SMALL_HEAD_SPEED = (0.40, 0.69)  # at 16 and 32, against 64: estimate
_BACKWARD_FLOPS = 2.5  # five products instead of two
_BACKWARD_FLOPS_UNFUSED = 4.0  # products of an unfused backward, which has kept the scores
_ITEM_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def item_bytes(dtype: str) -> int:
    """Bytes of one element that matrix units multiply; RequestError for other types."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return 1
    if name not in _ITEM_BYTES:
        known = ", ".join(_ITEM_BYTES)
        raise RequestError(f"'dtype' must be one of {known} or float8*, got {dtype!r}; cast the model first")
    return _ITEM_BYTES[name]


def gemm_s(device: Device, m: Numbers, n: Numbers, k: Numbers, *, batch: Numbers = 1, dtype: str = "bfloat16") -> Times:
    """Seconds of `batch` products of (m, k) by (k, n).

    The larger of the compute time (whole tiles, whole waves over the units, a ramp along k, the best tile and split)
    and the time to move operands and result once. Against the best published shapes of ten parts: median error 6 % in
    bfloat16 (always slower), 8 % in float8, worst 26 %.
    """
    rows, columns, depth, count = (np.asarray(x, np.float64) for x in (m, n, k, batch))
    peak, size = device.peak_flops_per_s(dtype), item_bytes(dtype)
    reached = device.gemm.float8_efficiency if size == 1 else device.gemm.efficiency
    compute = _compute_s(device, rows, columns, depth, count, peak * reached)
    moved = count * (rows * depth + depth * columns + rows * columns) * size / device.memory_rate_bytes_per_s
    work = rows * columns * depth * count > 0
    return _same(np.where(work, np.maximum(compute, moved) + device.gemm.kernel_fixed_s, 0.0))


def attention_flops(
    batch: Numbers, heads: Numbers, q_len: Numbers, kv_len: Numbers, head_dim: Numbers, *, causal: bool, backward: bool
) -> Times:
    """FLOP of the products of one attention; the backward alone if `backward`.

    A causal mask is aligned with the last key: half of the pairs when q_len = kv_len, more when queries are fewer.
    """
    b, h, q, kv, d = (np.asarray(x, np.float64) for x in (batch, heads, q_len, kv_len, head_dim))
    return _same(4.0 * b * h * q * _keys_seen(q, kv, causal) * d * (_BACKWARD_FLOPS if backward else 1.0))


def attention_s(
    device: Device,
    batch: Numbers,
    heads: Numbers,
    q_len: Numbers,
    kv_len: Numbers,
    head_dim: Numbers,
    *,
    dtype: str = "bfloat16",
    causal: bool = True,
    backward: bool = False,
    kernel: str | None = None,
) -> Times:
    """Seconds of one fused attention, the backward alone if `backward`; `heads` counts the query heads.

    `kernel` names an entry of the sheet ('cudnn', 'flash2', ...), by default the first. float32 and float64 run on the
    unfused path and are priced at the matrix-unit peak of that type; a causal mask is aligned with the last key, as on
    the last rank of a split sequence. Against the published rows of H100
    and A100: median error 2 % for flash2, 5 % for cudnn and 8 % for flash3 (forward alone), worst 33 %.
    """
    chosen, peak, size = device.attention_kernel(kernel), device.peak_flops_per_s(dtype), item_bytes(dtype)
    share = chosen.backward_efficiency if backward else chosen.forward_efficiency
    b, h, q, kv, d = (np.asarray(x, np.float64) for x in (batch, heads, q_len, kv_len, head_dim))
    speeds = (
        *(chosen.speed_at_64 * small for small in _SMALL_HEAD_SPEED),
        chosen.speed_at_64,
        1.0,
        chosen.speed_at_256,
    )
    speed = peak * share * np.interp(d, _HEAD_DIMS, speeds)
    accesses = chosen.backward_score_accesses if backward else chosen.forward_score_accesses
    if accesses > 0:
        return _same(_unfused_s(device, b * h, q, kv, d, size, speed, chosen, causal, backward))
    ramp = chosen.backward_ramp_tokens if backward else chosen.forward_ramp_tokens
    ramp = ramp * np.interp(d, (128.0, 256.0), (1.0, chosen.ramp_at_256))
    rows = np.where(q > _ATTENTION_LEAST_ROWS, np.ceil(q / _ATTENTION_TILE) * _ATTENTION_TILE, _ATTENTION_LEAST_ROWS)
    seen = kv - chosen.mask_saving * (kv - _keys_seen(rows, kv, causal))
    keys = np.where(kv > 0, seen + (_ATTENTION_TILE / 2 if causal else 0.0) + ramp, 0.0)
    item = np.minimum(rows, _ATTENTION_TILE) * (np.minimum(kv, _ATTENTION_SPLIT_KEYS) + ramp) * device.gemm.sm_count
    products = 4.0 * d * np.maximum(b * h * rows * keys, item) * (_BACKWARD_FLOPS if backward else 1.0)
    tensors = (5.0 * q + 4.0 * kv) if backward else (2.0 * q + 2.0 * kv)
    moved = b * h * d * size * tensors / device.memory_rate_bytes_per_s
    fixed = device.gemm.kernel_fixed_s * (_ATTENTION_BACKWARD_KERNELS if backward else 1.0)
    work = b * h * q * kv * d > 0
    return _same(np.where(work, np.maximum(products / speed, moved) + fixed, 0.0))


def _unfused_s(
    device: Device,
    heads: npt.NDArray[np.float64],
    q: npt.NDArray[np.float64],
    kv: npt.NDArray[np.float64],
    d: npt.NDArray[np.float64],
    size: int,
    speed: npt.NDArray[np.float64],
    kernel: Attention,
    causal: bool,
    backward: bool,
) -> npt.NDArray[np.float64]:
    """Products over all keys, masked or not, then softmax, mask and dropout over scores that lie in memory."""
    accesses = kernel.backward_score_accesses if backward else kernel.forward_score_accesses
    accesses += kernel.mask_score_accesses if causal else 0.0
    scores = heads * q * kv
    products = (2.0 * _BACKWARD_FLOPS_UNFUSED if backward else 4.0) * scores * d / speed
    moved = (scores * accesses + heads * np.maximum(q, kv) * d * kernel.tensor_accesses) * size
    seconds = products + moved / device.memory_rate_bytes_per_s
    return np.where(scores * d > 0, seconds + 4.0 * device.gemm.kernel_fixed_s, 0.0)


def memory_s(device: Device, moved_bytes: Numbers) -> Times:
    """Seconds of an elementwise, copy or reduction kernel that moves `moved_bytes` in all (reads + writes).

    The fixed time is the ramp: a kernel of few bytes reaches little of the bandwidth. Estimate: 10 % on large tensors.
    Where a cache was measured, what fits in it runs at its rate, and twice as much at the memory's.
    """
    size, measured = np.asarray(moved_bytes, np.float64), device.measured
    fixed = device.gemm.kernel_fixed_s if measured.memory_fixed_s is None else measured.memory_fixed_s
    seconds = size / device.memory_rate_bytes_per_s
    if measured.cache_bytes > 0:
        outside = np.clip(size / measured.cache_bytes - 1.0, 0.0, 1.0)
        seconds = outside * seconds + (1.0 - outside) * size / measured.cache_bytes_per_s
    return _same(np.where(size > 0, seconds + fixed, 0.0))


def _keys_seen(
    q_len: npt.NDArray[np.float64], kv_len: npt.NDArray[np.float64], causal: bool
) -> npt.NDArray[np.float64]:
    """Keys that an average query sees."""
    if not causal:
        return kv_len
    return np.where(q_len <= kv_len, kv_len - q_len / 2, kv_len**2 / (2 * np.maximum(q_len, 1.0)))


def _compute_s(
    device: Device,
    rows: npt.NDArray[np.float64],
    columns: npt.NDArray[np.float64],
    depth: npt.NDArray[np.float64],
    count: npt.NDArray[np.float64],
    flops_per_s: float,
) -> npt.NDArray[np.float64]:
    """Seconds of the products over the best tile and split; non-decreasing in every argument."""
    gemm = device.gemm
    per_unit = flops_per_s / gemm.sm_count
    best = np.full(np.broadcast_shapes(rows.shape, columns.shape, depth.shape, count.shape), np.inf)
    for share_m, share_n, speed in _TILES:
        tile_m, tile_n = max(8.0, gemm.tile_m * share_m), max(8.0, gemm.tile_n * share_n)
        tiles = np.ceil(rows / tile_m) * np.ceil(columns / tile_n) * count
        for split in _SPLITS:
            steps = np.ceil(depth / (gemm.tile_k * split)) + _K_FILL_TILES
            waves = np.ceil(tiles * split / gemm.sm_count)
            seconds = waves * (2.0 * tile_m * tile_n * gemm.tile_k) * steps / (per_unit * speed)
            if split > 1:
                seconds = seconds + 8.0 * split * rows * columns * count / device.memory_rate_bytes_per_s
            best = np.minimum(best, seconds)
    return best


def _same(value: npt.NDArray[np.float64]) -> Times:
    """A float for a number, an array for an array."""
    return float(value) if value.ndim == 0 else value

"""Published kernel rows: columns kind, gpu, impl, dtype, shape, tflops as in FlashAttention's and MAMF's tables.

A row says TFLOP/s; the published seconds are its FLOP by the usual count (a causal mask halves them) over that rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .devices import Device
from .kernels import attention_flops, attention_s, gemm_s
from .repricing import Priced, Refused, positive, source_name
from .systems import System, find_system

__all__ = ["COLUMNS", "price_kernel"]

COLUMNS = frozenset({"kind", "gpu", "shape"})

_TOKENS = 16384  # the FlashAttention benchmark keeps batch x sequence at 16k and heads x head size at 2048
_HIDDEN = 2048
_IMPLEMENTATIONS = (
    (r"flash.{0,12}3|flash_v3", "flash3"),
    (r"triton_tutorial", "triton-tutorial"),
    (r"triton", "triton"),
    (r"cudnn", "cudnn"),
    (r"flash.{0,12}2|flash_v2", "flash2"),
    (r"standard|eager|unfused|naive", "eager"),
)
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp16/bf16": "bfloat16",
    "fp8": "float8",
    "tf32": "tf32",
    "": "bfloat16",
}


def price_kernel(number: int, row: Mapping[str, str], systems: tuple[System, ...]) -> Priced | Refused:
    """The row priced on its device, or what it does not say."""
    system = find_system(systems, row["gpu"])
    rate = positive(row["tflops"])
    dtype = _DTYPES.get(row.get("dtype", "").strip().lower())
    if system is None:
        return Refused(row=number, reason=f"no device sheet for {row['gpu']!r}")
    if rate is None or dtype is None:
        return Refused(
            row=number, reason=f"it must say TFLOP/s and a known dtype, got {row['tflops']!r}, {row['dtype']!r}"
        )
    kind = row["kind"].lower()
    if kind.startswith("gemm"):
        priced = _gemm(system.device, row["shape"], dtype)
    elif kind.startswith("attention"):
        priced = _attention(system.device, row, dtype, forward_only="bwd" not in kind)
    else:
        return Refused(row=number, reason=f"kernels of kind {row['kind']!r} are not known: gemm or attention")
    if isinstance(priced, str):
        return Refused(row=number, reason=priced)
    seconds, flops, name = priced
    return Priced(
        row=number, source=source_name(row), model=name, device=system.device.name, kind=f"{kind} {dtype}",
        evidence="measured", published_s=flops / (rate * 1e12), predicted_s=seconds,
        group=(row["gpu"], kind), work=flops,
    )  # fmt: skip


def _gemm(device: Device, shape: str, dtype: str) -> tuple[float, float, str] | str:
    match = re.search(r"(\d+)x(\d+)x(\d+)", shape)
    if match is None:
        return f"a product must say MxNxK, got {shape!r}"
    if dtype not in dict(device.peaks_flops_per_s):
        return f"{device.name} has no matrix units for {dtype}"
    m, n, k = (int(text) for text in match.groups())
    return gemm_s(device, m, n, k, dtype=dtype), 2.0 * m * n * k, "gemm"


def _attention(
    device: Device, row: Mapping[str, str], dtype: str, *, forward_only: bool
) -> tuple[float, float, str] | str:
    given = dict(re.findall(r"(\w+)=(\w+)", row["shape"].lower()))
    head, seq = given.get("hdim", given.get("d")), given.get("seq", given.get("s"))
    name = next((name for pattern, name in _IMPLEMENTATIONS if re.search(pattern, row["impl"], re.IGNORECASE)), None)
    if not (head and seq and head.isdigit() and seq.isdigit()):
        return f"attention must say head size and sequence, got {row['shape']!r}"
    if name not in {kernel.name for kernel in device.attention}:
        return f"the sheet of {device.name} has no kernel like {row['impl']!r}"
    batch = int(given.get("b", max(1, _TOKENS // int(seq))))
    heads = int(given.get("h", max(1, _HIDDEN // int(head))))
    shape = (batch, heads, int(seq), int(seq), int(head))
    causal = given.get("causal") == "true"
    passes = (False,) if forward_only else (False, True)
    seconds = sum(attention_s(device, *shape, dtype=dtype, causal=causal, backward=b, kernel=name) for b in passes)
    flops = sum(attention_flops(*shape, causal=causal, backward=b) for b in passes)
    return float(seconds), float(flops), name

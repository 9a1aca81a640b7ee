"""Kernel times: units, monotonicity, quantisation, agreement of arrays and numbers, and published anchors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models.devices import device_names, load_device
from meshwright.cost_models.kernels import attention_flops, attention_s, gemm_s, item_bytes, memory_s
from meshwright.plans.errors import RequestError

_SIZES = st.integers(1, 20_000)


@pytest.mark.parametrize("name", ["a100-sxm", "h100-sxm", "h200-sxm", "b200-sxm"])
def test_large_gemm_reaches_a_plausible_share_of_peak(name: str) -> None:
    device = load_device(name)
    reached = 2 * 8192**3 / gemm_s(device, 8192, 8192, 8192)
    assert 0.60 < reached / device.peak_flops_per_s("bfloat16") < 0.85


@given(m=_SIZES, n=_SIZES, k=_SIZES, more=st.integers(1, 4000), where=st.sampled_from("mnkb"))
@settings(deadline=None, max_examples=200)
def test_larger_gemm_is_never_cheaper(m: int, n: int, k: int, more: int, where: str) -> None:
    device = load_device("h100-sxm")
    grown = {"m": (m + more, n, k, 1), "n": (m, n + more, k, 1), "k": (m, n, k + more, 1), "b": (m, n, k, 1 + more % 7)}
    rows, columns, depth, batch = grown[where]
    assert gemm_s(device, rows, columns, depth, batch=batch) >= gemm_s(device, m, n, k)


@pytest.mark.parametrize(("m", "n", "k"), [(8192, 4096, 4096), (4096, 28672, 8192), (2048, 14336, 4096)])
def test_tensor_parallel_shard_is_less_efficient(m: int, n: int, k: int) -> None:
    device = load_device("h100-sxm")
    full = gemm_s(device, m, n, k)
    assert gemm_s(device, m, n // 8, k) > full / 8
    assert gemm_s(device, m, n, k // 8) > full / 8


def test_quantisation_one_row_more_than_a_wave_costs_a_step() -> None:
    device = load_device("h100-sxm")
    rows = np.arange(1024, 8192, 64)
    speed = rows / gemm_s(device, rows, 8192, 8192)
    assert np.any(np.diff(speed) < 0) and np.all(np.diff(gemm_s(device, rows, 8192, 8192)) >= 0)


def test_decode_gemm_is_bound_by_memory() -> None:
    device = load_device("h100-sxm")
    weights_s = 8192 * 8192 * 2 / device.memory_bandwidth_bytes_per_s
    assert weights_s < gemm_s(device, 1, 8192, 8192) < 2 * weights_s


@pytest.mark.parametrize("name", device_names())
def test_arrays_agree_with_numbers_on_every_device(name: str) -> None:
    device = load_device(name)
    dtype = next(dtype for dtype in ("bfloat16", "float16") if dtype in dict(device.peaks_flops_per_s))
    sizes = np.array([1, 100, 1000, 4096])
    rows = [gemm_s(device, int(m), 512, 1024, batch=2, dtype=dtype) for m in sizes]
    np.testing.assert_allclose(gemm_s(device, sizes, 512, 1024, batch=2, dtype=dtype), rows, rtol=1e-12)
    rows = [attention_s(device, 2, 8, int(s), int(s), 128, dtype=dtype, backward=True) for s in sizes]
    together = attention_s(device, 2, 8, sizes, sizes, 128, dtype=dtype, backward=True)
    np.testing.assert_allclose(together, rows, rtol=1e-12)
    np.testing.assert_allclose(memory_s(device, sizes), [memory_s(device, int(s)) for s in sizes], rtol=1e-12)
    assert isinstance(memory_s(device, 8), float) and isinstance(rows[0], float)


@given(
    b=st.integers(1, 64), h=st.integers(1, 64), q=st.integers(1, 9000), kv=st.integers(1, 9000),
    d=st.sampled_from([16, 64, 80, 128, 192, 256]), more=st.integers(1, 2000), causal=st.booleans(),
    backward=st.booleans(), where=st.sampled_from("bhqkd"),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_larger_attention_is_never_cheaper(
    b: int, h: int, q: int, kv: int, d: int, more: int, causal: bool, backward: bool, where: str
) -> None:
    device = load_device("h100-sxm")
    grow = {letter: (more if letter == where else 0) for letter in "bhqkd"}
    small = attention_s(device, b, h, q, kv, d, causal=causal, backward=backward)
    large = attention_s(device, b + grow["b"], h + grow["h"], q + grow["q"], kv + grow["k"], d + grow["d"],
                        causal=causal, backward=backward)  # fmt: skip
    assert large >= small * (1 - 1e-9)


@pytest.mark.parametrize(
    ("name", "kernel", "head_dim", "causal", "seq", "tflops"),
    [  # forward + backward, FlashAttention-2 repository, assets @0251105a: 16k tokens, hidden size 2048
        ("h100-sxm", "flash2", 128, False, 4096, 326),
        ("h100-sxm", "flash2", 128, True, 1024, 221),
        ("h100-sxm", "flash2", 64, True, 4096, 257),
        ("a100-sxm", "flash2", 128, False, 8192, 201),
        ("a100-sxm", "flash2", 64, True, 2048, 140),
    ],
)
def test_attention_against_published_rows(
    name: str, kernel: str, head_dim: int, causal: bool, seq: int, tflops: float
) -> None:
    device, shape = load_device(name), (16384 // seq, 2048 // head_dim, seq, seq, head_dim)
    seconds = sum(attention_s(device, *shape, causal=causal, backward=b, kernel=kernel) for b in (False, True))
    flops = sum(attention_flops(*shape, causal=causal, backward=b) for b in (False, True))
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.10)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "dtype", "tflops"),
    [  # best shapes found, github:stas00/ml-engineering compute/accelerator/README.md @744d01e
        ("h100-sxm", 2048, 2048, 13312, "bfloat16", 794.5),
        ("a100-pcie", 2048, 5120, 6144, "bfloat16", 252.9),
        ("b200-sxm", 1792, 16128, 3072, "bfloat16", 1745.0),
        ("mi300x", 10240, 15360, 8192, "bfloat16", 668.4),
        ("b300-sxm", 3072, 6144, 7168, "float8", 3353.3),
    ],
)
def test_gemm_against_published_rows(name: str, m: int, n: int, k: int, dtype: str, tflops: float) -> None:
    assert 2 * m * n * k / gemm_s(load_device(name), m, n, k, dtype=dtype) / 1e12 == pytest.approx(tflops, rel=0.15)


def test_memory_time_has_a_size_ramp() -> None:
    device = load_device("h100-sxm")
    rate = np.array([2.0**20, 2.0**26, 2.0**32]) / memory_s(device, np.array([2.0**20, 2.0**26, 2.0**32]))
    assert np.all(np.diff(rate) > 0) and rate[0] < 0.2 * rate[2] < 0.2 * device.memory_bandwidth_bytes_per_s


def test_no_work_costs_nothing() -> None:
    device = load_device("h100-sxm")
    assert gemm_s(device, 0, 5, 5) == memory_s(device, 0) == attention_s(device, 1, 1, 0, 8, 64) == 0.0


def test_unknown_dtype_is_refused() -> None:
    assert item_bytes("torch.float8_e5m2") == 1
    with pytest.raises(RequestError, match="dtype"):
        item_bytes("complex64")

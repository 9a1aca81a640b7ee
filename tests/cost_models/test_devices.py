"""Device sheets: every shipped one loads strictly, says where its numbers come from, and damage is named."""

from __future__ import annotations

from importlib import resources

import pytest

from meshwright.cost_models.devices import device_names, load_device, read_device
from meshwright.plans.errors import RequestError

_EXPECTED = {
    "a100-pcie", "a100-sxm", "a100-sxm-40gb", "b200-sxm", "b300-sxm", "cpu", "gb200", "gb300", "gh200", "h100-pcie",
    "h100-sxm", "h200-sxm", "l40s", "mi250x", "mi300x", "mi325x", "mi355x", "rtx-3090", "rtx-4090", "tpu-v4", "tpu-v5e",
    "tpu-v5p", "tpu-v6e", "v100-sxm",
}  # fmt: skip


def _sheet(name: str) -> str:
    return (resources.files("meshwright.cost_models") / "devices" / f"{name}.toml").read_text(encoding="utf-8")


def test_all_expected_sheets_ship() -> None:
    assert set(device_names()) == _EXPECTED


@pytest.mark.parametrize("name", sorted(_EXPECTED))
def test_sheet_loads_with_sources_and_sane_units(name: str) -> None:
    device = load_device(name)
    sources = [text for _, text in device.sources]
    sources += [part.source for part in (device.gemm, device.intra_link, device.nic, *device.attention)]
    assert len(device.sources) == 3 and all(len(text) > 10 for text in sources)
    fastest = max(value for _, value in device.peaks_flops_per_s)
    assert 1e11 < fastest < 1e16
    assert 2**33 < device.memory_bytes < 2**39
    assert device.framework_constant_bytes < device.memory_bytes / 4
    assert 1e10 < device.memory_rate_bytes_per_s < 1e13
    assert 1e8 < device.nic.rate_bytes_per_s <= device.intra_link.rate_bytes_per_s < 1e12
    assert 0 < device.launch_overhead_compiled_s < device.launch_overhead_s < 1e-4
    assert device.name == name and hash(device) == hash(load_device(name))


def test_unknown_device_lists_near_names() -> None:
    with pytest.raises(RequestError, match="h100-sxm"):
        load_device("h100sxm")
    with pytest.raises(RequestError, match="near names"):
        load_device("../pyproject")


def test_dtype_without_matrix_units_is_refused() -> None:
    device = load_device("v100-sxm")
    assert device.peak_flops_per_s("torch.float16") == pytest.approx(125e12)
    with pytest.raises(RequestError, match="bfloat16"):
        device.peak_flops_per_s("bfloat16")
    assert load_device("h100-sxm").peak_flops_per_s("float8_e4m3fn") == pytest.approx(1979e12)


def test_attention_kernel_by_name() -> None:
    device = load_device("h100-sxm")
    assert device.attention_kernel(None).name == "cudnn"
    assert device.attention_kernel("flash2").name == "flash2"
    with pytest.raises(RequestError, match="flash3"):
        device.attention_kernel("flash9")


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ("efficiency = 0.8\n", "efficiency = 1.8\n", "efficiency"),
        ("sm_count = 132", "sm_count = 132.5", "sm_count"),
        ("sm_count = 132", "sm_count = true", "sm_count"),
        ("tile_k = 64\n", "", "tile_k"),
        ("tile_k = 64\n", "tile_k = 64\ntile_q = 1\n", "tile_q"),
        ("tf32 =", "tf33 =", "tf33"),
        ("eager_s = 5e-06", "eager_s = nan", "eager_s"),
        ("eager_s = 5e-06", "eager_s = -1.0", "eager_s"),
        ("[launch]", "[launch", "TOML"),
        ('name = "nvlink4"', 'name = ""', "name"),
    ],
)
def test_damaged_sheet_is_named(old: str, new: str, word: str) -> None:
    text = _sheet("h100-sxm")
    assert old in text
    with pytest.raises(RequestError, match=word):
        read_device(text.replace(old, new, 1), "a test")


def test_sheet_without_source_is_refused() -> None:
    lines = [line for line in _sheet("cpu").splitlines() if not line.startswith("source")]
    with pytest.raises(RequestError, match="source"):
        read_device("\n".join(lines), "a test")

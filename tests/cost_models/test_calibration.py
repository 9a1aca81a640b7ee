"""Calibrations: parameters recovered from times made of known ones, the file, and what prices make of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from meshwright.cost_models import Calibration, Prices, load_device
from meshwright.cost_models.calibration import Family, Machine, Quantity, Sample, calibrated
from meshwright.cost_models.calibration_report import report_text, residuals_svg
from meshwright.cost_models.fitting import fit, predicted_s
from meshwright.cost_models.uncertainty import datasheet_uncertainties, interval_s
from meshwright.plans import Cluster, Mesh
from meshwright.plans.errors import CalibrationError

TRUE = {
    "product.units": 1.0,
    "launch.eager_s": 7e-6,
    "launch.view_s": 2e-6,
    "memory.bytes_per_s": 2.0e10,
    "memory.fixed_s": 5e-7,
    "memory.cache_bytes": 1.5e6,
    "memory.cache_bytes_per_s": 1.1e11,
    "memory.fresh_s_per_byte": 2e-10,
    "product.float32.flops_per_s": 1.6e11,
    "product.fixed_s": 9e-6,
    "attention.forward_efficiency": 0.4,
    "attention.backward_efficiency": 0.3,
    "attention.forward_ramp_tokens": 60.0,
    "attention.backward_ramp_tokens": 90.0,
    "attention.mask_saving": 0.5,
    "launch.compiled_s": 4e-6,
    "update.adamw.per_tensor_s": 2e-4,
    "update.adamw.per_byte_s": 2e-9,
    "launch.step_s": 4e-4,
    "launch.parameter_s": 9e-5,
    "link.bytes_per_s": 1e9,
    "link.ramp_s": 1e-4,
    "link.base_latency_s": 2e-4,
    "link.slowdown.reduce_scatter": 1.8,
    "overlap.unhidden": 0.7,
    "beside.product": 1.25,
    "beside.memory": 1.6,
    "beside.host": 1.1,
    "link.skew_s": 4e-5,
}


def rows() -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = [
        ("launch", (20,)),
        ("view", (10,)),
        ("small", (20,)),
        ("fused", (1 << 22,)),
    ]
    found += [("memory", (1 << p,)) for p in range(12, 27)]
    found += [("fresh", (3 << p, 1 << p)) for p in (18, 20, 22)]
    found += [("product", s) for s in ((512, 512, 512, 1), (64, 1024, 1024, 1), (128, 128, 128, 1), (16, 16, 16, 1))]
    found += [
        ("attention", (2, 4, n, n, 64, causal, back)) for n in (128, 512, 1024) for causal in (0, 1) for back in (0, 1)
    ]
    found += [("update.adamw", (6, n)) for n in (4096, 1 << 18, 1 << 20)]
    found += [("step", (5, 5, 3, 4)), ("step", (35, 25, 13, 24))]
    for kind in ("all_reduce", "reduce_scatter"):
        found += [(f"collective.{kind}", (1 << p, 2)) for p in (12, 16, 19, 22, 24)]
    found += [(f"beside.{what}", (2_000_000,)) for what in ("product", "memory", "host")]
    return [*found, ("behind", (1 << 20, 2, 3_000_000)), ("alternate", (1 << 14, 2, 50_000, 12))]


def taken(noise: float) -> list[Sample]:
    device, random = calibrated(load_device("cpu"), TRUE), np.random.default_rng(0)
    found = []
    for kind, sizes in rows():
        row = Sample(kind=kind, sizes=sizes, dtype="float32", measured_s=1.0, predicted_s=1.0, spread=noise)
        seconds = predicted_s(device, row, synchronous=True) * float(np.exp(random.normal(0.0, noise)))
        found.append(msgspec.structs.replace(row, measured_s=seconds))
    return found


def made(**changes: Any) -> Calibration:
    quantities = tuple(Quantity(name=n, value=v, unit="s", uncertainty=0.1, samples=3) for n, v in TRUE.items())
    base = Calibration(
        meshwright_version="0.1.0",
        torch_version="2.13.0",
        name="here",
        sheet="cpu",
        machine=Machine(processor="a processor", threads=1, ranks=2, load=0.5),
        quantities=quantities,
        families=(Family(name="product", rows=4, mean=0.05, p90=0.1, worst=0.2),),
        samples=tuple(taken(0.1)[:6]),
    )
    return msgspec.structs.replace(base, **changes)


def test_exact_times_give_back_every_parameter() -> None:
    quantities, families, samples = fit(load_device("cpu"), taken(0.0), synchronous=True, known={"product.units": 1.0})
    assert max(abs(s.predicted_s / s.measured_s - 1) for s in samples) < 2e-3
    found = {q.name: q for q in quantities}
    for name in ("memory.bytes_per_s", "product.float32.flops_per_s", "update.adamw.per_byte_s", "overlap.unhidden",
                 "beside.product", "beside.memory", "beside.host", "link.skew_s"):  # fmt: skip
        assert found[name].value == pytest.approx(TRUE[name], rel=0.02), name
        assert found[name].uncertainty < 0.05
    assert {f.name for f in families} == {"host", "memory", "product", "attention", "update", "collective"}
    assert found["link.bytes_per_s"].unit == "B/s"
    assert "link.latency_s" not in found  # one size of groups does not tell a hop from a start


def test_noise_and_one_outlier_leave_the_rates_near() -> None:
    rough = taken(0.1)
    worst = next(at for at, row in enumerate(rough) if row.kind == "product")
    rough[worst] = msgspec.structs.replace(rough[worst], measured_s=5 * rough[worst].measured_s)
    quantities, _, _ = fit(load_device("cpu"), rough, synchronous=True, known={"product.units": 1.0})
    found = {q.name: q.value for q in quantities}
    assert found["product.float32.flops_per_s"] == pytest.approx(1.6e11, rel=0.25)
    assert found["memory.bytes_per_s"] == pytest.approx(2e10, rel=0.25)
    assert found["link.bytes_per_s"] == pytest.approx(1e9, rel=0.25)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = made()
    first.save(tmp_path / "here.json")
    assert Calibration.load(tmp_path / "here.json") == first
    assert [p.name for p in tmp_path.iterdir()] == ["here.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(version=2),
        lambda t: t.update(format="meshwright-plan"),
        lambda t: t.update(more=1),
        lambda t: t.pop("families"),
        lambda t: t["quantities"].append(t["quantities"][1]),
        lambda t: t["quantities"][3].update(value=0.0),
        lambda t: t["quantities"][4].update(value=-1.0),
        lambda t: t["quantities"][0].update(name="nonsense"),
        lambda t: t["quantities"][8].update(name="product.int3.flops_per_s"),
        lambda t: t["quantities"][23].update(name="link.slowdown.gossip"),
        lambda t: t["quantities"][6].update(value=1e9),  # a cache slower than memory
        lambda t: t["machine"].update(processor="\x1b[2J"),
        lambda t: t.update(sheet="cpu9"),
        lambda t: t.update(quantities=[]),
    ],
)
def test_what_is_no_calibration_is_refused(change: Callable[[dict], None]) -> None:
    tree = json.loads(made().to_bytes())
    change(tree)
    with pytest.raises(ValueError, match="must"):
        Calibration.from_bytes(json.dumps(tree).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(CalibrationError, match="'calibration' must"):
        Calibration.from_bytes(data)


def test_a_path_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="'calibration' must name a readable file"):
        Calibration.load(tmp_path / "none.json")


def test_prices_come_from_it_and_say_so() -> None:
    cluster, mesh, found = Cluster.parse("cpu:2"), Mesh.parse("2"), made()
    prices = Prices.of(cluster, mesh, compiled=False, calibration=found)
    assert (prices.launch_s, prices.step_s) == pytest.approx((1.1 * 7e-6, 1.1 * 4e-4))  # beside another rank
    assert prices.source == found.cite() and "links between nodes" in prices.source
    assert dict(prices.uncertainties) == {**datasheet_uncertainties(), "product": 0.1}
    rate = 2 * 1024**3 / prices.gemm_s(1024, 1024, 1024, dtype="float32")
    assert rate == pytest.approx(1.6e11 / 1.25, rel=0.1)
    assert prices.update_s("adamw", 7.0, 1e6) == pytest.approx(1.1 * (9e-5 + 2e-4) + 1.6 * 2e-3)
    whole, scattered = (prices.collective_s(kind, 1 << 24, 0) for kind in ("all_gather", "reduce_scatter"))
    assert scattered - TRUE["link.skew_s"] == pytest.approx(1.8 * (whole - TRUE["link.skew_s"]))
    with pytest.raises(CalibrationError, match="h100-sxm"):
        Prices.of(Cluster.parse("h100-sxm:2"), mesh, compiled=False, calibration=found)


def test_what_was_not_measured_is_named() -> None:
    alone = made(quantities=tuple(q for q in made().quantities if not q.name.startswith(("link", "overlap"))))
    assert {"links inside a node", "overlap"} <= set(alone.remaining()) and "products" not in alone.remaining()


def test_an_interval_is_as_wide_as_the_uncertainties() -> None:
    low, high = interval_s({"product": 2.0, "host": 1.0}, {"product": 0.0, "host": 1.0})
    assert (low, high) == (2.5, 4.0)


def test_the_report_names_every_quantity_and_the_picture_is_xml() -> None:
    found = made()
    text = report_text(found, samples=True)
    assert all(quantity.name in text for quantity in found.quantities) and "from the data sheet cpu: " in text
    circles = [e for e in ElementTree.fromstring(residuals_svg(found)).iter() if e.tag.endswith("circle")]
    assert len(circles) == 6 + len(found.samples)


def test_ranks_take_from_each_other_as_soon_as_there_are_two() -> None:
    """Kernels, updates and the host slow down by what was measured; a collective waits for the last rank."""
    one, two = (Prices.of(Cluster("cpu", 1, n), Mesh.parse(str(n)), compiled=False, calibration=made()) for n in (1, 2))
    ratios = {
        "product": float(two.gemm_s(2048, 2048, 2048, dtype="float32") / one.gemm_s(2048, 2048, 2048, dtype="float32")),
        "memory": float(two.memory_s(1 << 28) / one.memory_s(1 << 28)),
        "update": float(two.update_s("adamw", 30.0, 1 << 28) / one.update_s("adamw", 30.0, 1 << 28)),
        "host": two.launch_s / one.launch_s,
    }
    assert ratios == pytest.approx({"product": 1.25, "memory": 1.6, "update": 1.6, "host": 1.1}, rel=0.02)
    plain = msgspec.structs.replace(made(), quantities=tuple(q for q in made().quantities if q.name != "link.skew_s"))
    without = Prices.of(Cluster("cpu", 1, 2), Mesh.parse("2"), compiled=False, calibration=plain)
    assert two.collective_s("all_reduce", 1 << 16, 0) - without.collective_s("all_reduce", 1 << 16, 0) == (
        pytest.approx(TRUE["link.skew_s"])
    )
    assert two.collective_s("all_reduce", 0, 0) == 0

"""The logic of benchmarks/gpu_truth.py, on the CPU with tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.cost_models import Calibration
from meshwright.cost_models.calibration import Machine, Quantity

ROOT = Path(__file__).resolve().parent.parent


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_truth", ROOT / "benchmarks" / "gpu_truth.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some_calibration() -> Calibration:
    quantity = Quantity(name="product.float32.flops_per_s", value=1e11, unit="FLOP/s", uncertainty=0.1, samples=9)
    return Calibration(
        meshwright_version="0", torch_version="2", name="here", sheet="cpu", quantities=(quantity,), families=(),
        machine=Machine(processor="any", threads=1, ranks=1, load=0.0), samples=(),
    )  # fmt: skip


def test_held_out_kernels_are_measured_and_predicted() -> None:
    truth = script()
    rows = truth.kernels(some_calibration(), "cpu", tiny=True)
    assert len(rows) == len(truth.PRODUCTS) + 2 * len(truth.ATTENTIONS) + len(truth.STREAMS)
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)
    assert all(row["error"] == row["predicted_s"] / row["measured_s"] - 1 for row in rows)
    assert truth.summary(rows)["rows"] == len(rows)


def test_every_model_has_tiny_sizes() -> None:
    truth = script()
    for name in truth.MODELS:
        model, args = truth.built(name, "cpu", tiny=True)
        assert model(*args).dim() == 0


@pytest.mark.slow
def test_a_step_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_calibration().save(tmp_path / "here.json")
    out = tmp_path / "truth.json"
    given = ["gpu_truth", "vit", "--tiny", "--calibration", str(tmp_path / "here.json"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    assert script().main() == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["name"] for row in found["steps"]] == ["vit eager"] and found["errors"]["steps"]["rows"] == 1

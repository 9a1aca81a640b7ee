"""Measuring this machine, and planning with what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.cost_models import Calibration
from meshwright.cost_models.calibration import Machine, Quantity
from meshwright.planner.adapt import reprice
from meshwright.planner.api import plan
from meshwright.planner.calibrate import calibrate, sweeps
from meshwright.planner.calibrate.clock import Case, take
from meshwright.planner.explaining.explain import explain
from meshwright.plans.errors import RequestError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


INPUT = (torch.randn(32, 64),)


def measured(**values: float) -> Calibration:
    quantities = tuple(Quantity(name=n, value=v, unit="s", uncertainty=0.1, samples=1) for n, v in values.items())
    machine = Machine(processor="any", threads=1, ranks=2, load=0.0)
    return Calibration(
        meshwright_version="0", torch_version="2", name="slow", sheet="cpu", machine=machine, quantities=quantities,
        families=(), samples=(),
    )  # fmt: skip


SLOW = measured(**{"launch.eager_s": 1e-3, "launch.step_s": 0.5, "update.adamw.per_tensor_s": 1e-2})


def test_a_plan_is_priced_by_the_calibration_and_cites_it(tmp_path: Path) -> None:
    SLOW.save(tmp_path / "slow.json")
    request = {"cluster": "cpu:2", "compiled": False}
    by_sheet = plan(model(), INPUT, **request)
    by_file = plan(model(), INPUT, **request, calibration=tmp_path / "slow.json")
    assert by_file.calibration == SLOW.cite() and by_sheet.calibration == "datasheet cpu v1"
    # The step itself, four updates, and a millisecond for every kernel.
    kernels = sum(node.count for node in by_file.nodes if node.time_s > 0)
    assert by_file.predicted.step_time_s > 0.5 + 4 * 1e-2 + kernels * 1e-3 > by_sheet.predicted.step_time_s
    for made in (by_sheet, by_file):
        low, high = made.predicted.step_time_interval_s or (0.0, 0.0)
        assert 0 < low < made.predicted.step_time_s < high
    again = reprice(by_sheet, model(), INPUT, calibration=SLOW)
    assert again.predicted.step_time_s > 0.5 and again.calibration == SLOW.cite()
    with pytest.raises(RequestError, match="'calibration' must be the one that the plan cites"):
        explain(by_file, "0.weight", model(), INPUT)
    assert explain(by_file, "0.weight", model(), INPUT, calibration=SLOW).alternatives


def test_every_sweep_runs_and_is_timed() -> None:
    cases = [*sweeps.launches("cpu"), *sweeps.products("cpu", "float32", quick=True)[-2:]]
    cases += [*sweeps.memory("cpu", quick=True)[:3], sweeps.attention("cpu", "float32", quick=True)[-1]]
    found = take(cases, rounds=2, device="cpu")
    assert [row.kind for row in found] == [case.kind for case in cases]
    assert all(row.measured_s > 0 and row.spread >= 0 for row in found)


def test_parts_and_fixed_calls_count() -> None:
    calls = []
    case = Case(kind="launch", sizes=(1,), run=lambda: calls.append(1), parts=10, calls=5)
    (one,) = take([case], rounds=3, device="cpu")
    assert len(calls) == 3 + 3 * 5 and one.measured_s < 1e-4


@pytest.mark.parametrize("request_", [{"ranks": 0}, {"ranks": 10_000}, {"threads": 0}, {"threads": 10_000}])
def test_what_this_machine_cannot_do_is_refused(request_: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(request_))):
        calibrate(sheet="cpu", **request_)


@pytest.mark.slow
def test_this_machine_is_measured_with_two_ranks(tmp_path: Path) -> None:
    told: list[str] = []
    found = calibrate(sheet="cpu", ranks=2, threads=1, quick=True, compiled=False,
                      on_progress=lambda stage, *_: told.append(stage))  # fmt: skip
    found.save(tmp_path / "here.json")
    names = {quantity.name for quantity in Calibration.load(tmp_path / "here.json").quantities}
    assert {"product.float32.flops_per_s", "memory.bytes_per_s", "link.bytes_per_s", "overlap.unhidden"} <= names
    assert found.remaining() == ("compiled programs", "links between nodes", "memory size")
    assert any(stage.startswith("collectives") for stage in told)


def test_plans_with_intervals_are_compared() -> None:
    first = plan(model(), INPUT, cluster="cpu:2", compiled=False)
    second = plan(model(), INPUT, cluster="cpu:2", compiled=False, calibration=SLOW)
    text = str(first.diff(second))
    assert "step_time_s" in text and "calibration slow" in text

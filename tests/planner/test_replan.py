"""`replan`: the plan for the devices that are left, and what moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import cli
from meshwright.cli_replan import _moves_text
from meshwright.planner.resilience import job_of_plan, replan_job
from meshwright.plans import Infeasible, RequestError

Run = Callable[..., tuple[int, str, str]]

# Devices so slow and links so fast that work is worth dividing.
CLUSTER = '{"device": "cpu", "nodes": 2, "devices_per_node": 4, "memory_bytes": 3000000}'
MODEL = (nn.Sequential(nn.Linear(120, 240), nn.GELU(), nn.Linear(240, 120)), (torch.randn(2400, 120),), {})


@pytest.fixture(scope="module")
def plan() -> mw.Plan:
    return mw.plan(*MODEL, cluster=CLUSTER, mesh="2x4", loss=lambda out: out.square().mean())


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def test_the_survivors_get_a_plan_and_their_state(plan: mw.Plan) -> None:
    found = mw.replan(plan, {5: 0.0, 6: 0.2}, *MODEL, loss=loss, tries=2)
    assert set(found.devices) <= {0, 1, 2, 3, 4, 7} and len(set(found.devices)) == found.plan.mesh.size
    assert set(found.devices) | set(found.idle) | {5} == set(range(8))
    assert found.plan.cluster.devices_per_node * found.plan.cluster.nodes == len(found.devices)
    assert found.step_time_s == found.plan.predicted.step_time_s
    assert found.plan.predicted.memory.peak_bytes <= 3000000
    assert found.migration.digest() == found.migration.digest()
    assert {move.donor for move in found.migration.moves} <= {0, 1, 2, 3, 4, 6, 7}
    assert {move.receiver for move in found.migration.moves} <= set(found.devices)
    assert (found.migration_bytes > 0) == (found.migration_s > 0)
    text = _moves_text(found.migration)
    assert "kept in place" in text and ("nobody that lives holds" in text) == (found.missing_bytes > 0)


def test_a_slow_device_is_kept_where_that_is_faster(plan: mw.Plan) -> None:
    found = mw.replan(plan, {3: 0.98}, *MODEL, loss=loss, tries=1)
    assert 3 in found.devices and not found.idle
    assert found.plan.predicted.compute_s >= plan.predicted.compute_s / 0.98 * 0.99


def test_requests_that_cannot_be_met(plan: mw.Plan) -> None:
    with pytest.raises(Infeasible, match="a device alive"):
        mw.replan(plan, dict.fromkeys(range(8), 0.0), *MODEL, loss=loss)
    with pytest.raises(Infeasible, match="none:\n.*memory limit of 3000000"):
        mw.replan(plan, dict.fromkeys(range(1, 8), 0.0), *MODEL, loss=loss)
    for health, options, message in [
        ({8: 0.0}, {}, "one of 8 devices"),
        ({0: 2.0}, {}, "0 \\(dead\\) to 1"),
        ({0: 0.5}, {"tries": 0}, "'tries' must be a whole number from 1"),
        ({0: 0.5}, {"horizon_s": 0.0}, "'horizon_s' must be positive"),
    ]:
        with pytest.raises(RequestError, match=message):
            mw.replan(plan, health, *MODEL, **options)
    with pytest.raises(RequestError, match="records no SPEC"):
        mw.replan(plan, {0: 0.5})


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        return code, *capfd.readouterr()

    before, after = str(tmp_path / "plan.json"), str(tmp_path / "after.json")
    assert run("plan", "llama-tiny", "--layers", "1", "--cluster", "cpu:4", "-o", before)[0] == 0
    code, text, _ = run("replan", before, "--health", "2=0", "--tries", "1", "--moves", "-o", after, "--json")
    out = json.loads(text)
    assert code == 0 and out["devices"] == [0, 1, 3] and out["mesh"] == {"dp": 3} and out["idle"] == []
    assert {"status", "step_time_s", "memory_bytes_per_rank", "gap", "pipeline", "planner_cpu_s"} <= out.keys()
    assert {"migration_bytes", "migration_s", "missing_bytes"} <= out.keys() and out["plan"] == after
    assert mw.Plan.load(after).digest() == out["digest"]
    assert sum(row["bytes"] for row in out["moves"]) == out["migration_bytes"] and out["kept_bytes"] > 0
    assert sum(row["bytes"] for row in out["missing"]) == out["missing_bytes"]
    assert run("plan", "llama-tiny", "--cluster", "cpu:2x4", "--mesh", "2x4", "-o", after)[0] == 0
    whole = mw.Plan.load(after)
    job = job_of_plan(whole, tensor=2, stages=2, replicas=2, microbatches=8)
    assert job.layers == 4 and job.devices == 8 and job.forward_s[1] < job.backward_s[1] < 4 * job.forward_s[1]
    seconds = (sum(job.forward_s) + sum(job.backward_s)) * job.tensor * job.microbatches / whole.mesh.size
    assert seconds == pytest.approx(sum(node.time_s * node.count for node in whole.nodes))
    assert sum(job.state_bytes) == pytest.approx(4 * whole.model.parameter_bytes)
    assert set(replan_job(job, {3: 0.0}).arrangement.devices) <= {0, 1, 2, 4, 5, 6, 7}
    for words, message in [
        ((), "add e.g. --health 17=0"),
        (("--health", "x"), "DEVICE=SPEED"),
        (("--health", "9=0"), "one of 4 devices"),
    ]:
        code, _, said = run("replan", before, *words)
        assert code == 2 and message in said
    code, _, said = run("replan", before, *(word for i in range(4) for word in ("--health", f"{i}=0")))
    assert code == 3 and "a device alive" in said

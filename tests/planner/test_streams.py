"""A plan's step on streams: what it consists of, and what prefetch and joined gradients change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.cli import run
from meshwright.planner.explaining.streams import Streams, streams_of
from meshwright.plans.errors import RequestError


def _model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        layers = [part for _ in range(4) for part in (nn.Linear(4096, 4096, bias=False), nn.GELU())]
        return nn.Sequential(*layers), (torch.empty(8192, 4096),)


def _loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


@pytest.fixture(scope="module")
def streams() -> tuple[mw.Plan, Streams]:
    model, args = _model()
    plan = mw.plan(model, args, cluster="h100-sxm:8", mesh="8", loss=_loss, recipe="fsdp", recompute="none")
    cases = ((1, 0), (0, 0), (2, 0), (1, 1 << 30))
    return plan, streams_of(plan, model, args, loss=_loss, cases=cases)


def test_nothing_ahead_is_no_faster_and_pairs_lie_near_streams(streams: tuple[mw.Plan, Streams]) -> None:
    plan, found = streams
    one, none, two, _ = found.cases
    assert none.step_s > one.step_s >= two.step_s - 1e-9
    assert none.step_s > 1.02 * one.step_s
    assert found.step_s == plan.predicted.step_time_s == pytest.approx(one.step_s, rel=0.1)
    assert "by pairs" in str(found) and "streams, 2 ahead" in str(found)


def test_compute_is_that_of_the_plan(streams: tuple[mw.Plan, Streams]) -> None:
    plan, found = streams
    told = plan.predicted
    for case in found.cases:
        assert case.step_s - case.exposed_s - case.dragged_s == pytest.approx(
            told.compute_s + told.optimizer_s, rel=0.01
        )


def test_gradients_joined_wait_for_each_other(streams: tuple[mw.Plan, Streams]) -> None:
    _, found = streams
    assert found.cases[3].exposed_s > found.cases[0].exposed_s  # all are sent at the end


def test_wrong_cases_are_refused(streams: tuple[mw.Plan, Streams]) -> None:
    model, args = _model()
    with pytest.raises(RequestError, match="at least 0"):
        streams_of(streams[0], model, args, loss=_loss, cases=((-1, 0),))


@pytest.mark.slow
def test_the_command_says_it_of_a_saved_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    assert run(["plan", "llama-tiny", "--cluster", "h100-sxm:2", "--mesh", "2", "--recipe", "fsdp", "-o", path]) == 0
    capfd.readouterr()
    assert run(["explain", path, "--overlap", "--prefetch", "0", "--bucket", "1MiB", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [(c["prefetch"], c["bucket_bytes"]) for c in found["cases"]] == [(1, 0), (0, 1 << 20)]
    assert found["cases"][1]["step_s"] >= found["cases"][0]["step_s"] > 0

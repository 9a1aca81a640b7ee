"""Tiny models of real architectures through pipelines: tied embeddings, blocks by turns, encoder and decoder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.planner.api import plan
from meshwright.planner.verify import check
from meshwright.planner.zoo import chunks_of

from ..architectures import ARCHITECTURES

MODELS = ("llama", "gpt2", "gemma", "nemotron-h", "t5")


def built(name: str) -> tuple[nn.Module, tuple, dict]:
    """Without dropout: what a stage draws is not what one process draws."""
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[name]()
    return model.eval(), args, kwargs


def on_a_rank(name: str) -> tuple:
    return *built(name), None


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved:2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_equals_one_process(name: str, schedule: str) -> None:
    mesh = "2" if chunks_of(schedule) == 1 else "1"
    report = check(*built(name), mesh=mesh, pipeline=2, microbatches=2, schedule=schedule, random=1, seed=3)
    assert report.equal, report.differences
    assert report.compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_pipeline_trains(name: str) -> None:
    from functools import partial

    model, args, kwargs = built(name)
    found = plan(model, args, kwargs, cluster="cpu:2", pipeline=2, microbatches=2, time_limit_s=20.0)
    assert found.pipeline is not None and found.pipeline.ranks == 2
    report = check(model, args, kwargs, plan=found, build=partial(on_a_rank, name))
    assert report.equal, report.differences

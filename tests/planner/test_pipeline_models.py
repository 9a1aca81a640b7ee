"""Tiny models of real architectures through pipelines: tied embeddings, blocks by turns, encoder and decoder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.planner.api import plan
from meshwright.planner.checking.verify import check
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
@pytest.mark.parametrize(
    "schedule", ["gpipe", "looped-bfs:2", "interleaved:4", "zb-h1", "zb-h2", "v-half", "v-min", "dualpipev"]
)
def test_every_schedule_of_a_hybrid(schedule: str) -> None:
    """Blocks of several kinds by turns, with stages of a few ops where there are more stages than blocks."""
    count = 4 if schedule == "dualpipev" else 2
    model, args, kwargs = built("nemotron-h")
    args, kwargs = larger(args, count), {name: larger((value,), count)[0] for name, value in kwargs.items()}
    report = check(model, args, kwargs, mesh="1", pipeline=2, microbatches=count, schedule=schedule, random=1, seed=1)
    assert report.equal, report.differences


def larger(tensors: tuple, count: int) -> tuple:
    """Inputs whose batch holds at least `count` samples."""
    return tuple(
        torch.cat([t] * -(-count // t.shape[0])) if isinstance(t, torch.Tensor) and t.dim() else t for t in tensors
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp", "tp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_pipeline_on_meshes_equals_one_process(name: str, recipe: str) -> None:
    """Each pipeline rank has two devices, that split its samples or its weights."""
    model, args, kwargs = built(name)
    args, kwargs = larger(args, 4), {key: larger((value,), 4)[0] for key, value in kwargs.items()}
    found = plan(
        model, args, kwargs, cluster="cpu:4", mesh="2", pipeline=2, microbatches=2, recipe=recipe, time_limit_s=10.0
    )
    assert found.pipeline is not None and found.pipeline.ranks == 2
    report = check(model, args, kwargs, plan=found)
    # These models compute losses and norms in float32 whatever they are given: that is as near as they come.
    assert report.equal, report.differences


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_planned_pipeline_trains(name: str) -> None:
    from functools import partial

    model, args, kwargs = built(name)
    found = plan(model, args, kwargs, cluster="cpu:2", pipeline=2, microbatches=2, time_limit_s=20.0)
    assert found.pipeline is not None and found.pipeline.ranks == 2
    report = check(model, args, kwargs, plan=found, build=partial(on_a_rank, name))
    assert report.equal, report.differences

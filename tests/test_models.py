"""Tiny random-weight models of real architectures equal the single process on simulated and on real ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from meshwright.passes import capture
from meshwright.planner.checking.verify import check
from meshwright.plans.errors import CaptureError

from .architectures import ARCHITECTURES, REFUSED

# One of some kinds: decoder, tied weights and dropout, encoder with padding, images, convolutions, experts, sound with
# checks of its inputs. All the others are in the slow tables.
QUICK = ("llama", "gpt2", "bert", "vit", "resnet", "mixtral", "wav2vec2")
MESHES = ("2", "3", "4", "2x2", "2x2x2")
# A chosen plan need not be proven best here.
SECONDS = 10.0


def built(name: str) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(0)
    return ARCHITECTURES[name]()


def on_a_rank(name: str) -> tuple:
    """What `check` builds in each process: the model, its inputs, and its own loss (None: that in its output)."""
    return *built(name), None


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_equals_one_process(name: str) -> None:
    """The chosen one, or a random one: the first splits little of so small a model."""
    random = QUICK.index(name) % 2
    report = check(*built(name), mesh="2", random=random, seed=5, time_limit_s=SECONDS, steps=2)
    assert report.equal, report.differences
    assert report.compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_chosen_plan_equals_one_process(name: str, mesh: str) -> None:
    report = check(*built(name), mesh=mesh, time_limit_s=SECONDS)
    assert report.equal, report.differences


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_plans_equal_one_process(name: str, mesh: str) -> None:
    report = check(*built(name), mesh=mesh, random=2)
    assert report.equal, report.differences


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_learnt_or_unseen_values_is_refused(name: str) -> None:
    build, message = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=message):
        capture(*build())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_random_plans_on_real_processes_equal_one_process(name: str) -> None:
    report = check(*built(name), mesh="2", random=1, seed=3, build=partial(on_a_rank, name))
    assert report.backend == "gloo"
    assert report.equal, report.differences

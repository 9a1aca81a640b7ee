"""Pipelines on simulated ranks compute what one process computes on the whole batch: losses, gradients, parameters."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from torch import nn

from meshwright.passes.capture import capture
from meshwright.passes.microbatches import smaller_microbatch
from meshwright.planner.checking.check import CheckReport, compare, default_loss, train
from meshwright.planner.checking.check_pipeline import simulate_pipeline
from meshwright.planner.zoo import named_schedule
from meshwright.plans import Plan, RequestError

from ..pipelines import Tied, Twisted, batch_of, pipelined, random_schedule

TOLERANCE = 1e-10


def checked(model: nn.Module, args: tuple, plan: Plan, captured: object, smaller: object = None) -> CheckReport:
    want = train(model, args, {}, default_loss, steps=3, seed=0)
    if isinstance(model, Twisted):
        # The forward changes it once for each micro-batch.
        assert plan.pipeline is not None
        want.values["buffer", "seen"] *= plan.pipeline.microbatches  # type: ignore[operator]
    got = simulate_pipeline(model, args, {}, captured, plan, smaller=smaller)  # type: ignore[arg-type]
    return compare(want, got, captured, TOLERANCE, 0, loss_inside=True)  # type: ignore[arg-type]


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def trial(seed: int) -> CheckReport:
    """A random pipeline of a small model."""
    rng = random.Random(seed)
    model = model_of(rng.choice([Twisted, Tied]))
    microbatches = rng.choice([1, 2, 4])
    args = batch_of(model, 4)
    ranks = rng.randint(1, 3)
    schedule = random_schedule(rng.randint(max(2, ranks), 5), ranks, microbatches, rng)
    mesh = rng.choice(["1", "2", "2", "2x2"])
    recompute = rng.choice(["none", "pointwise", "block"])
    plan, captured = pipelined(model, args, mesh=mesh, schedule=schedule, seed=seed, recompute=recompute)
    assert plan.pipeline is not None
    reduce = ("step", "microbatch")[seed % 2]
    plan = msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(plan.pipeline, reduce_gradients=reduce))
    return checked(model, args, plan, captured)


@pytest.mark.parametrize("seed", range(3))
def test_random_pipelines(seed: int) -> None:
    report = trial(seed)
    assert report.equal and report.compared > 10, report


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 60))
def test_more_random_pipelines(seed: int) -> None:
    report = trial(seed)
    assert report.equal and report.compared > 10, report


def test_a_tied_weight_in_stages_of_one_rank_and_of_two() -> None:
    """Divided once, and summed over all that hold it, whether its stages are together or apart."""
    model = model_of(Tied)
    args = batch_of(model)
    for placement in ("zb-v", "interleaved:2"):
        schedule = named_schedule(placement, 2, 4)
        firsts = ("", "blocks.0", "blocks.1", "head")
        plan, captured = pipelined(model, args, mesh="2", schedule=schedule, seed=0, firsts=firsts)
        report = checked(model, args, plan, captured)
        assert report.equal, report


@pytest.mark.parametrize(("kind", "batch", "count", "mesh"), [(Twisted, 10, 4, "2"), (Tied, 5, 3, "1")])
def test_micro_batches_that_do_not_divide_the_batch(kind: type[nn.Module], batch: int, count: int, mesh: str) -> None:
    """The last ones have a sample less and count for less: the loss is the mean over the samples."""
    model = model_of(kind)
    args = batch_of(model, batch)
    plan, captured = pipelined(model, args, mesh=mesh, schedule=named_schedule("zb-h1", 2, count), seed=2)
    few = smaller_microbatch(args, {}, count)
    assert few is not None
    smaller = capture(model, *few, loss=default_loss, recompute="none", again=captured.again)
    report = checked(model, args, plan, captured, smaller)
    assert report.equal, report


def test_more_micro_batches_than_samples_are_refused() -> None:
    with pytest.raises(RequestError, match="at most the samples of the batch, got 3 for 2"):
        smaller_microbatch(batch_of(Tied(), 2), {}, 3)

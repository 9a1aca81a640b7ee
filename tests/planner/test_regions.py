"""Regions that a user wrote with local_map are kept: run in their placements, priced, chosen among alternatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

import meshwright
from meshwright.passes.regions import attach_regions
from meshwright.plans.errors import CaptureError

SEEN: list[tuple[int, ...]] = []


def experts(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """(experts, tokens, d) through one MLP per expert."""
    SEEN.append(tuple(x.shape))
    return torch.bmm(torch.bmm(x, up).relu(), down)


def region(outs: Placement, *ins: Placement) -> Any:
    return local_map(experts, out_placements=[outs], in_placements=tuple([p] for p in ins))


BY_EXPERT = region(Shard(0), Shard(0), Shard(0), Shard(0))
BY_TOKEN = region(Shard(1), Shard(1), Replicate(), Replicate())
BY_WIDTH = region(Partial(), Replicate(), Shard(2), Shard(1))


class Mixture(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run
        self.up, self.down = (nn.Parameter(torch.randn(shape) * 0.3) for shape in ((4, 6, 10), (4, 10, 6)))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.run(x, self.up, self.down).tanh())


def call(run: Any) -> tuple[nn.Module, tuple, dict[str, Any]]:
    torch.manual_seed(0)
    return Mixture(run), (torch.randn(4, 5, 6),), {}


def layouts(plan: meshwright.Plan) -> dict[str, tuple[Any, ...]]:
    nodes = [n for n in plan.nodes if n.op.startswith("meshwright.region")]
    return {n.op: (n.outputs, tuple(e.layout for e in n.inputs)) for n in nodes}


@pytest.mark.parametrize("run", [BY_EXPERT, BY_TOKEN, BY_WIDTH], ids=["expert", "token", "width"])
def test_a_region_runs_in_its_placements_on_pieces(run: Any) -> None:
    plan = meshwright.plan(*call(run), cluster="cpu:2", mesh="2")
    outs, ins = layouts(plan)["meshwright.region"]
    assert ("S(0)",) in ins or ("S(1)",) in ins
    SEEN.clear()
    assert meshwright.check(*call(run), plan=plan).equal
    assert (2, 5, 6) in SEEN or (4, 3, 6) in SEEN or run is BY_WIDTH


def test_the_planner_chooses_among_alternatives() -> None:
    run = meshwright.any_of(BY_TOKEN, BY_EXPERT, BY_WIDTH)
    for pin, want in (("S(0)", ("S(0)",) * 3), ("R", ("R", "S(2)", "S(1)"))):
        pins = ["args.0 = " + pin, "::meshwright.region.0 = " + ("S(0)" if pin == "S(0)" else "P(sum)")]
        plan = meshwright.plan(*call(run), cluster="cpu:2", mesh="2", constraints=pins)
        assert layouts(plan)["meshwright.region"][1] == tuple((p,) for p in want)
        assert meshwright.check(*call(run), plan=plan).equal
    assert meshwright.check(*call(run), mesh="2", random=3).equal
    assert meshwright.check(*call(run), mesh="3", random=1).equal


def test_a_region_is_priced_by_what_it_computes() -> None:
    def seconds(run: Any) -> float:
        plan = meshwright.plan(*call(run), cluster="h100-sxm:2", mesh="2", compiled=False)
        return next(n.time_s for n in plan.nodes if n.op == "meshwright.region")

    assert seconds(BY_EXPERT) > 1e-6


def test_without_a_plan_a_region_is_its_function() -> None:
    model, (x,), _ = call(meshwright.any_of(BY_TOKEN, BY_EXPERT))
    want = model.out(experts(x, model.up, model.down).tanh())  # type: ignore[operator, arg-type]
    assert torch.equal(model(x), want)
    assert attach_regions(torch.fx.Graph(), []) is None


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (local_map(experts, out_placements=[Shard(0)]), "must say how tensors lie, got None"),
        (region(Shard(0), Shard(0)), "a placement for each of 3 positional inputs"),
        (local_map(experts, [Shard(0), Shard(0)], ([Shard(0), Shard(0)],) * 3), "for each of the 1 axes of the mesh"),
    ],
)
def test_a_region_that_says_too_little_is_refused(run: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        meshwright.plan(*call(run), cluster="cpu:2", mesh="2")


def test_alternatives_are_made_by_local_map() -> None:
    with pytest.raises(CaptureError, match="'any_of' must be given functions made by local_map"):
        meshwright.any_of(experts)

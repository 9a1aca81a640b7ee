"""Dynamic dims: planned once, right at every size of the range, refused by name outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import meshwright
from meshwright import Plan
from meshwright.planner.api import draft
from meshwright.planner.checking.verify import random_plan, usual_cluster
from meshwright.planner.dynamic import dynamic_dims
from meshwright.plans.errors import CaptureError, ReplayError, RequestError
from meshwright.plans.meshes import Mesh

GRID = Mesh.of((2, 2))
DIMS = {"x": {0: Dim("batch", min=2, max=64), 1: Dim("seq", min=3, max=40)}}


class Regroup(nn.Module):
    """Attention-like: heads are split off, rows are merged and cut again, a mask is as long as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(seq, seq, dtype=torch.bool).triu(1), -1e9)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch * seq, 12))
        y = y.reshape(batch, seq * 12).cumsum(1).view(batch, seq, 12)
        return {"rows": y if shift is None else y + shift, "whole": y.mean((0, 1))}


def call(batch: int, seq: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Regroup().double(), (torch.randn(batch, seq, 12, dtype=torch.float64),), {}


def plans(count: int) -> list[Plan]:
    """The chosen plan, and random ones, for 4 sequences of 8."""
    options: dict[str, Any] = {"cluster": usual_cluster(GRID), "mesh": GRID, "dynamic": DIMS}
    chosen = meshwright.plan(*call(4, 8), time_limit_s=3.0, **options)
    modes = ("pointwise", "none", "block")
    return [chosen] + [random_plan(draft(*call(4, 8), recompute=modes[i % 3], **options), i) for i in range(count)]


def test_one_plan_runs_every_size_of_its_range() -> None:
    for plan in plans(1):
        for batch, seq in ((3, 5), (7, 7)):
            report = meshwright.check(*call(batch, seq), plan=plan, steps=2)
            assert report.equal and report.max_error < 1e-10, (plan.options.recompute, batch, seq, report)


@pytest.mark.slow
def test_many_plans_run_every_size_of_their_range() -> None:
    for plan in plans(12):
        for batch, seq in ((4, 8), (3, 5), (2, 3), (7, 7), (5, 16), (8, 4), (2, 40), (12, 12)):
            report = meshwright.check(*call(batch, seq), plan=plan, steps=1)
            assert report.equal and report.max_error < 1e-10, (plan.options.recompute, batch, seq, report)


def test_the_ranges_are_in_the_plan_file_and_are_kept_to() -> None:
    plan = Plan.from_bytes(plans(0)[0].to_bytes())
    assert [(d.input, d.dim, d.span) for d in plan.options.dynamic] == [
        ("args.0", 0, "batch from 2 to 64"),
        ("args.0", 1, "seq from 3 to 40"),
    ]
    with pytest.raises(ReplayError, match=r"planned range of dim 0 of args\.0, batch from 2 to 64, got 65"):
        meshwright.check(*call(65, 8), plan=plan)
    with pytest.raises(ReplayError, match=r"dim 1 of args\.0, seq from 3 to 40, got 2;"):
        meshwright.check(*call(4, 2), plan=plan)
    model, (x,), _ = call(4, 8)
    with pytest.raises(ReplayError):
        meshwright.check(model, (x[..., :6],), plan=plan)


def test_sizes_that_a_plan_without_dynamic_dims_cannot_split_are_refused() -> None:
    class Groups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.view(-1, 3, 4) * self.scale).sum(0)

    model, pins = Groups(), ["args.0 = S(0)", "::mul.0 = S(0)"]
    even, odd = ((torch.randn(n, 4),) for n in (12, 15))
    plan = meshwright.plan(model, even, cluster="cpu:2", mesh="2", constraints=pins)
    assert meshwright.check(model, (torch.randn(24, 4),), plan=plan).equal
    with pytest.raises(ReplayError, match=r"at which ::reshape\.0 cannot run as S\(0\); plan with these dims declared"):
        meshwright.check(model, odd, plan=plan)
    rows = {"x": {0: 3 * Dim("groups")}}
    plan = meshwright.plan(model, even, cluster="cpu:2", mesh="2", constraints=pins, dynamic=rows)
    assert meshwright.check(model, odd, plan=plan).equal


def test_a_model_that_runs_other_ops_at_other_sizes_is_refused() -> None:
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if x.shape[0] > 4 else x.cos()

    with pytest.raises(
        CaptureError, match=r"'dynamic' must name dims whose size does not change which ops the model runs"
    ):
        meshwright.plan(Long(), (torch.randn(6, 4),), cluster="cpu:2", dynamic={"x": {0: "rows"}})


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"y": {0: "batch"}}, "'y'; they are x"),
        ({"x": {5: "batch"}}, r"dims of args\.0 of shape \[4, 8, 12\], got 5"),
        ({"x": {0: 3.5}}, "got 3.5"),
        ({"x": {0: (9, 20)}}, r"got 4 for dim 0 of args\.0, declared args\.0\.0 from 9 to 20"),
        ({"x": {0: (2, 1)}}, "got 2 to 1"),
        (7, "must be a dict"),
    ],
)
def test_a_wrong_declaration_is_refused(dynamic: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        meshwright.plan(*call(4, 8), cluster="cpu:2", dynamic=dynamic)


def test_dims_are_declared_in_several_ways() -> None:
    ways = [
        {"x": {0: "b"}},
        {"x": ("b", None)},
        ({0: (2, 9)},),
        {"args.0": {-3: Dim.AUTO}},
        {"x": {0: 2 * Dim("h")}},
    ]
    for dynamic in ways:
        found = dynamic_dims(*call(4, 8), dynamic)
        assert [(d.input, d.dim) for d in found.dims] == [("args.0", 0)]
        assert dynamic_dims(*call(4, 8), found.dims).dims == found.dims
    assert found.dims[0].span == "h from 4 up by 2" and not found.dims[0].takes(7)


def test_other_sizes_are_odd_and_the_smallest() -> None:
    def sizes(dynamic: object) -> list[list[int]]:
        return [list(args[0].shape) for args, _ in dynamic_dims(*call(4, 8), dynamic).calls]

    assert sizes(DIMS) == [[3, 5, 12], [2, 3, 12]]
    assert sizes({"x": {0: (4, 4)}}) == []
    assert sizes({"x": {0: (3, 4)}}) == [[3, 8, 12]]
    assert sizes({"x": {0: 2 * Dim("h")}}) == [[6, 8, 12]]

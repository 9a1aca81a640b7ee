"""Local programs hold no op in a form that Inductor cannot compile."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.passes.local import localize
from meshwright.passes.lookup import PlanLookup
from meshwright.passes.split import split
from meshwright.planner.api import draft
from meshwright.planner.checking.verify import random_plan
from meshwright.plans import Mesh


def test_variances_are_those_that_inductor_has_a_lowering_for() -> None:
    """prims.var takes its correction by position, Inductor's lowering only by name."""
    model, mesh = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), Mesh.of((2,))
    prepared = draft(model, (torch.randn(4, 3, 6, 6),), cluster="cpu:2", mesh=mesh, recompute="none")
    plan = random_plan(prepared, 0)
    halves = split(localize(prepared.captured, PlanLookup(plan), mesh, (0,), ["axis:0"]))
    targets = [node.target for half in (halves.forward, halves.backward) for node in half.graph.nodes]
    assert torch.ops.aten.var.correction in targets
    assert torch.ops.prims.var.default not in targets

"""Replay across change: what is the same keeps its choices, what is new is solved for, and it computes right."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from meshwright.planner.adapt import adapt, differences, reprice
from meshwright.planner.api import plan
from meshwright.planner.checking.verify import check
from meshwright.plans.errors import ReplayError
from meshwright.plans.plan import Plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, layers: int = 2, head: str = "head", width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.add_module(head, nn.Linear(width, 4))
        self.last = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.get_submodule(self.last)(x).square().mean()


INPUTS = (torch.ones(8, 8),)
PINS = ["layers.*.up.weight = S(0)", "layers.*.down.weight = S(1)"]


def planned(**options: object) -> Plan:
    torch.manual_seed(0)
    return plan(Net(), INPUTS, cluster="h100-sxm:2", mesh="2", recompute="none", constraints=PINS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_a_plan_is_carried_over_to_another_number_of_layers(layers: int) -> None:
    torch.manual_seed(0)
    base, model = planned(), Net(layers)
    if layers == 1:
        with pytest.raises(ReplayError, match="blocks"):
            reprice(base, model, INPUTS)
        return
    assert differences(base, model, INPUTS).lengths == (f"layers.*: 2 -> {layers}",)
    found = adapt(base, model, INPUTS)
    assert found.lengths == (f"layers.*: 2 -> {layers}",) and not found.new and not found.gone
    assert found.plan.model.blocks[0].count == layers
    layouts = {t.name: t.layout for t in found.plan.parameters}
    assert {layout for name, layout in layouts.items() if name.endswith("up.weight")} == {("S(0)",)}
    assert check(model, INPUTS, mesh="2", plan=found.plan).equal


def test_what_is_new_is_solved_for_and_named() -> None:
    base, model = planned(), Net(head="classifier")
    with pytest.raises(ReplayError, match="head"):
        reprice(base, model, INPUTS)
    told = differences(base, model, INPUTS)
    assert "classifier.weight" in told.new and "head.weight" in told.gone and not told.same
    found = adapt(base, model, INPUTS)
    assert found.new == told.new and "new: " in str(found)
    kept = {t.name: t.layout for t in base.parameters if t.name.startswith("layers")}
    assert kept.items() <= {t.name: t.layout for t in found.plan.parameters}.items()
    assert check(model, INPUTS, mesh="2", plan=found.plan).equal


def test_a_layout_that_is_none_here_is_solved_for() -> None:
    base = plan(Net(width=8), INPUTS, cluster="h100-sxm:2", mesh="2", constraints=["head.weight = S(0)"])
    model = Net(width=8)
    model.head = nn.Linear(8, 1)
    found = adapt(msgspec.structs.replace(base, options=_free(base)), model, INPUTS)
    assert check(model, INPUTS, mesh="2", plan=found.plan).equal


def _free(base: Plan) -> object:
    return msgspec.structs.replace(base.options, constraints=())


def test_the_same_model_keeps_every_choice() -> None:
    base = planned()
    found = adapt(base, Net(), INPUTS)
    assert found.same and base.diff(found.plan).same


def test_a_plan_is_priced_anew() -> None:
    base = planned()
    stale = msgspec.structs.replace(base, predicted=msgspec.structs.replace(base.predicted, compute_s=1.0))
    now = reprice(stale, Net(), INPUTS)
    assert now.predicted.step_time_s == pytest.approx(base.predicted.step_time_s)
    assert now.predicted.compute_s == pytest.approx(base.predicted.compute_s)
    assert now.nodes == base.nodes and now.solver == base.solver


def test_another_torch_version_in_range_replays_and_one_outside_is_refused() -> None:
    base = planned()
    reprice(msgspec.structs.replace(base, torch_version="2.14.1"), Net(), INPUTS)
    with pytest.raises(ReplayError, match=r"2\.9\.0"):
        adapt(msgspec.structs.replace(base, torch_version="2.9.0"), Net(), INPUTS)

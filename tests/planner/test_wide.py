"""What is pinned may leave any device without elements, though the search would not look at it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(17, 2)
        self.row = nn.Parameter(torch.ones(1, 17))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.row)


@pytest.mark.parametrize(("mesh", "devices"), [("4", 4), ("2x2", 4), ("12", 12)])
def test_a_pin_may_leave_most_devices_without_elements(mesh: str, devices: int) -> None:
    torch.manual_seed(0)
    axes = mesh.count("x") + 1
    pins = [f"{name} = {','.join(['S(0)'] * axes)}" for name in ("row", "linear.bias", "args.0")]
    call = (Few(), (torch.randn(3, 17),))
    plan = meshwright.plan(*call, cluster=f"cpu:{devices}", mesh=mesh, constraints=pins)
    held = {t.name: t.layout for t in (*plan.parameters, *plan.inputs)}
    assert held["row"] == held["linear.bias"] == held["args.0"] == ("S(0)",) * axes
    assert meshwright.check(*call, plan=plan, steps=2).equal

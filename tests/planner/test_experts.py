"""Mixtures of experts: the search finds expert parallelism where it pays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import meshwright


class Capacity(nn.Module):
    """Each token goes to one expert, which takes `slots` of them; the rest is dropped."""

    def __init__(self, width: int, hidden: int, experts: int, slots: int) -> None:
        super().__init__()
        self.experts, self.slots = experts, slots
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, expert = self.router(x).softmax(-1).max(-1)
        hot = F.one_hot(expert, self.experts)
        place = (hot.cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
        slot = F.one_hot(place.clamp(max=self.slots - 1), self.slots) * (place < self.slots)[:, None]
        sent = torch.einsum("te,ts->tes", hot.to(x.dtype), slot.to(x.dtype))
        taken = torch.einsum("tes,td->esd", sent, x)
        made = torch.einsum("esh,ehd->esd", torch.einsum("esd,edh->esh", taken, self.up).relu(), self.down)
        return torch.einsum("tes,esd->td", sent, made) * gate[:, None]


def test_experts_with_a_capacity_are_spread_over_the_devices() -> None:
    with torch.device("meta"):
        model, x = Capacity(2048, 8192, 8, 512).bfloat16(), torch.empty(2048, 2048, dtype=torch.bfloat16)
    plan = meshwright.plan(model, (x,), cluster="h100-sxm:8", mesh="8", time_limit_s=20.0)
    held = {t.name: t.layout for t in plan.parameters}
    assert held["up"] == held["down"] == ("S(0)",)
    weights = [edge for node in plan.nodes for edge in node.inputs if edge.source in ("up", "down")]
    assert weights and all(edge.layout == ("S(0)",) and not edge.steps for edge in weights)

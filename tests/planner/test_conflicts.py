"""Requests without a plan: the limits that are named conflict, none can be spared, and the nearest change fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.planner.api import plan
from meshwright.planner.explaining.conflicts import explain_infeasible
from meshwright.plans.errors import Infeasible, RequestError


class Net(nn.Module):
    def __init__(self, width: int = 8192) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def request() -> tuple[nn.Module, tuple]:
    with torch.device("meta"):
        return Net(), (torch.empty(16384, 8192),)


WHERE = {"cluster": "h100-sxm:4", "mesh": "2x2", "recompute": "none"}
PINS = ["up.weight = R,R", "args.0 = S(0),*", "down.weight = R,R"]


def test_the_limits_that_conflict_do_and_none_can_be_spared() -> None:
    limit = 6 * 10**9
    found = explain_infeasible(*request(), **WHERE, memory_limit_bytes=limit, constraints=PINS)
    assert found.minimal and f"memory limit of {limit} bytes per device" in found.limits
    pins = [text.removeprefix("constraint ") for text in found.limits if text.startswith("constraint")]
    assert pins and set(pins) < set(PINS)
    with pytest.raises(Infeasible):
        plan(*request(), **WHERE, memory_limit_bytes=limit, constraints=pins)
    assert plan(*request(), **WHERE, constraints=pins).nodes
    for pin in pins:
        rest = [other for other in pins if other != pin]
        assert plan(*request(), **WHERE, memory_limit_bytes=limit, constraints=rest).nodes


def test_the_least_memory_fits_and_less_does_not() -> None:
    found = explain_infeasible(*request(), **WHERE, memory_limit_bytes=10**9)
    assert found.limits == ("memory limit of 1000000000 bytes per device",)
    least, proven = found.least_memory_bytes, found.proven_memory_bytes
    # The least limit is of a plan that was counted, the proven one is of the estimate, which may be too high.
    assert least is not None and proven is not None and proven <= least <= 1.3 * proven
    roomy = int(1.1 * least)
    assert plan(*request(), **WHERE, memory_limit_bytes=roomy).predicted.memory.peak_bytes <= roomy
    with pytest.raises(Infeasible):
        plan(*request(), **WHERE, memory_limit_bytes=int(0.99 * proven))


def test_constraints_that_exclude_each_other_are_named_alone() -> None:
    pins = ["*.weight = *,R", "up.weight != R,R", "up.weight = R,*", "args.0 = S(0),*"]
    with pytest.raises(Infeasible, match="drop one of them"):
        plan(*request(), **WHERE, constraints=pins)
    found = explain_infeasible(*request(), **WHERE, constraints=pins)
    assert found.minimal and set(found.limits) == {f"constraint {pin}" for pin in pins[:3]}
    assert set(found.drop) == set(found.limits)
    with pytest.raises(RequestError, match="must leave up.weight a layout"):
        plan(*request(), **WHERE, constraints=["up.weight = S(7),R"])


def test_a_request_that_has_a_plan_has_no_conflict_and_without_time_nothing_is_claimed() -> None:
    assert "there is a plan" in str(explain_infeasible(*request(), **WHERE, constraints=PINS))
    found = explain_infeasible(*request(), **WHERE, memory_limit_bytes=1, time_limit_s=1e-9)
    assert not found.limits and not found.minimal and "could not be told" in str(found)

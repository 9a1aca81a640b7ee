"""Replicas of unlike sizes, planned: which devices each keeps, and its share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.planner.replanning.solved import Solved
from meshwright.planner.training.portions import groups_by_rule, groups_of, portions_for
from meshwright.plans import Plan, RequestError

MODEL = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
ARGS = (torch.randn(12, 8),)


@pytest.fixture(scope="module")
def whole() -> Plan:
    return mw.plan(MODEL, ARGS, cluster="a100-sxm:6", mesh="3x2", constraints=["*.weight = R,S(0)"])


def test_a_hurt_replica_keeps_its_fastest_devices(whole: Plan) -> None:
    speeds = {0: 1.0, 1: 0.4, 2: 1.0, 3: 0.6, 5: 1.0}
    groups = groups_of(whole, speeds)
    # Two at 0.4 are slower than one; two at 0.6 are not.
    assert [group.devices for group in groups] == [(0,), (2, 3), (5,)]
    assert [group.mesh.shape for group in groups] == [(1, 1), (1, 2), (1, 1)]
    # One that comes takes the place of the dead one.
    assert groups_of(whole, speeds, fresh=[6])[2].devices == (6, 5)


def test_samples_go_by_speed(whole: Plan) -> None:
    speeds = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 5: 1.0}
    solved = Solved(model=MODEL, args=ARGS, kwargs={})
    found = portions_for(whole, groups_of(whole, speeds), speeds, solved, time_limit_s=5.0)
    assert found is not None and found.devices == (0, 1, 2, 3, 5)
    assert [portion.share for portion in found.portions] == [5, 5, 2]
    assert [portion.plan.inputs[0].shape[0] for portion in found.portions] == [5, 5, 2]
    assert [str(portion.plan.mesh) for portion in found.portions] == ["1x2", "1x2", "1x1"]


def test_rules_that_make_no_sense(whole: Plan) -> None:
    assert [group.devices for group in groups_by_rule("1x2 + 1x1", whole, [0, 3, 4])] == [(0, 3), (4,)]
    with pytest.raises(RequestError, match="'mesh' must name replicas by meshes with the plan's 2 axes"):
        groups_by_rule("2 + 1", whole, [0, 1, 2])
    with pytest.raises(RequestError, match="'mesh' must name replicas for the 2 processes"):
        groups_by_rule("1x2 + 1x1", whole, [0, 1])

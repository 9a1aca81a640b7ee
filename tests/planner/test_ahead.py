"""What the runtime asks of `replan`: the same plan on every survivor, made ahead, and who is slow."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.passes.holdings import holders_of
from meshwright.passes.microbatches import microbatch
from meshwright.passes.training_step import loss_of
from meshwright.planner.apply import capture_for
from meshwright.planner.replanning.replan import least_copies
from meshwright.planner.training.ahead import ahead_of, curve_of
from meshwright.planner.training.epochs import IDLE, Beat
from meshwright.planner.training.pace import Pace, slow_ones
from meshwright.planner.training.stalls import Stalls
from meshwright.planner.training.survivors import Request, assigned
from meshwright.plans import Infeasible, Plan, RequestError
from meshwright.plans.stage_holders import stage_holders
from meshwright.specs.load import load_spec

MODEL = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Memory:
    """A shelf in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.kept[key] = value


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def request(**options: object) -> Request:
    given = {"cluster": "cpu:4", "optimizer": "adamw", **options}
    return Request(model=MODEL, args=(torch.randn(24, 16),), kwargs={}, loss=loss, mesh="2x2", options=given)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return mw.plan(
        MODEL, (torch.randn(24, 16),), cluster="cpu:4", mesh="2x2", loss=loss, constraints=["*.weight = R,*"]
    )


def test_survivors_find_the_same_plan_and_what_was_made_ahead_at_once(plan: Plan) -> None:
    asked, shelf = request(constraints=["*.weight = R,*"]), Memory()
    ranks = (4, 7, 9, 12)
    base = plan, ranks
    for _ in ahead_of(asked, plan, 0, asked.solved(shelf)):
        pass
    alone = assigned(asked, (4, 7, 12), base, {}, asked.solved())
    began = time.process_time()
    found = assigned(asked, (4, 7, 12), base, {}, asked.solved(shelf))
    assert time.process_time() - began < 0.1
    assert Plan.from_bytes(found.plan).digest() == Plan.from_bytes(alone.plan).digest() and found.ranks == alone.ranks
    assert set(found.ranks) <= {4, 7, 12} and len(found.ranks) == Plan.from_bytes(found.plan).mesh.size
    # A replacement takes the place of the lost one, and the plan stays.
    again = assigned(asked, (4, 7, 12, 13), base, {}, asked.solved(shelf))
    assert again.ranks == (4, 7, 13, 12) and again.plan == plan.to_bytes()
    # Two copies are kept, as there were before.
    few = assigned(asked, (4, 7), base, {}, asked.solved(shelf))
    assert len(few.ranks) == 2 and least_copies(Plan.from_bytes(few.plan)) == 2


def test_a_slow_process_is_left_out_where_that_is_faster(plan: Plan) -> None:
    asked = request(constraints=["*.weight = R,*"])
    solved = asked.solved()
    found = assigned(asked, (0, 1, 2, 3), (plan, (0, 1, 2, 3)), {2: 0.001}, solved)
    assert 2 not in found.ranks
    after = Plan.from_bytes(found.plan)
    assert after.predicted.step_time_s < plan.predicted.step_time_s * 100
    # Well again, and others are lost: it is taken up.
    more = assigned(asked, (2, 3), (after, found.ranks), {}, solved)
    assert set(more.ranks) == {2, 3}


def test_replans_that_ask_for_devices_meshes_and_copies(plan: Plan) -> None:
    call = MODEL, (torch.randn(24, 16),)
    more = mw.replan(plan, {}, *call, loss=loss, added=[0, 0], mesh="3x2")
    assert more.devices == (0, 1, 2, 3, 4, 5) and more.plan.cluster.devices_per_node == 6
    assert {m.receiver for m in more.migration.moves} == set(range(6))
    one = mw.replan(plan, {0: 0.0, 1: 0.0}, *call, loss=loss, copies=2)
    assert least_copies(one.plan) == 2 and len(one.devices) == 2
    for options, message in [
        ({"copies": 0}, "'copies' must be 1"),
        ({"added": [-1]}, "'added' must have the node"),
        ({"mesh": "9x9"}, "'mesh' must be one for devices"),
    ]:
        with pytest.raises(RequestError, match=message):
            mw.replan(plan, {0: 0.0}, *call, loss=loss, **options)  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match="a device alive"):
        mw.replan(plan, dict.fromkeys(range(4), 0.0), *call, loss=loss)


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_a_slow_step_is_told_from_noise_and_from_large_batches(noise: float) -> None:
    pace, draw = Pace(0.001, 0.8), random.Random(0)
    pace.checks = 0
    for step in range(300):
        large = draw.random() < 0.3
        slow = 2.0 if step >= 200 else 1.0
        pace.took((0.09 if large else 0.03) * slow * draw.lognormvariate(0, noise), 0.003 if large else 0.001)
        assert step >= 200 or not pace.checks, step
        if pace.checks:
            break
    assert 200 <= step < 240
    assert pace.checked([1.0, 1.1, 2.5, 0.9]) == {}
    assert pace.checked([1.0, 1.1, 2.0, 2.0]) == {2: 0.55}
    assert slow_ones([1.0, 3.0], 0.8) == {1: 0.33} and slow_ones([1.0, 1.1], 0.8) == {}


def test_ranks_are_checked_now_and_then_without_an_alarm() -> None:
    pace = Pace(0.03, 0.8)
    # When an epoch begins; all are alike.
    while pace.checks:
        assert pace.checked([0.02, 0.02, 0.021]) == {}
    seconds = 0.0
    while not pace.checks:
        pace.took(0.03)
        seconds += 0.03
    # Two checks of three pieces of 21 ms.
    assert 2 * 3 * 0.021 / seconds <= 1e-3
    assert pace.checked([0.02, 0.05, 0.02]) == {} and pace.checked([0.02, 0.05, 0.02]) == {1: 0.4}


def test_the_curve_of_a_step_over_its_batch() -> None:
    asked = request(dynamic={"input": {0: (4, 4096)}})
    given = mw.plan(MODEL, asked.args, cluster="cpu:2", mesh="2", loss=loss, dynamic={"input": {0: (4, 4096)}})
    curve = curve_of(asked, given, MODEL)
    assert curve is not None and curve.sizes[0] == 4 and curve.sizes[-1] == 4096
    dims = given.options.dynamic
    small, whole = (curve.at(dims, {dims[0].input: (size, 16)}) for size in (24, 4000))
    assert small is not None and whole is not None and small < whole
    assert curve.at(dims, {"other": (24, 16)}) is None
    assert curve_of(asked, mw.plan(MODEL, asked.args, cluster="cpu:2", mesh="2", loss=loss), MODEL) is None


def test_nobody_waits_for_one_that_is_idle() -> None:
    stalls = Stalls(5.0, 10.0)
    for second in range(40):
        beats = [Beat(count=second, done=second, stage="step", issued={"dp": second})] * 2
        for who, beat in enumerate([*beats, Beat(count=second, stage=IDLE)]):
            stalls.heard(who, beat, float(second))
        assert list(stalls.to_end(range(3), float(second))) == []
    # The others stand still, too: it is still not the one that is behind.
    for second in range(40, 60):
        for who, stage, issued in ((0, "step", 39), (1, "step", 38), (2, IDLE, 0)):
            given = {"dp": issued} if issued else {}
            stalls.heard(who, Beat(count=second, done=39, stage=stage, issued=given), float(second))
    assert [who for who, _ in stalls.to_end(range(3), 59.0)] == [1]


@pytest.mark.parametrize("name", [pytest.param("llama-tiny", marks=pytest.mark.slow), "gpt2-tiny"])
def test_a_pipeline_is_replanned_and_its_state_found_by_the_plan_alone(name: str) -> None:
    model, args, kwargs = load_spec(name, batch=8, seq_len=8, layers=4).build()
    before = mw.plan(
        model, args, kwargs, cluster="cpu:4", pipeline=2, microbatches=4, mesh="2", schedule="1f1b", time_limit_s=2.0
    )
    captured = capture_for(before, model, *microbatch(args, kwargs, 4), loss_of)
    exact = holders_of(captured, before)
    told = stage_holders(before)
    assert exact is not None and {key: told[key] for key in exact} == exact
    found = mw.replan(before, {3: 0.0}, model, args, kwargs, time_limit_s=2.0, tries=2)
    assert found.plan.pipeline is not None and found.plan.pipeline.microbatches == 4
    # Three values are held of each parameter; all that the lost device held alone must come from elsewhere.
    places = {m.receiver for m in found.migration.moves} | {m.receiver for m in found.migration.missing}
    assert places == set(found.devices)
    held = found.migration.moved_bytes + found.migration.kept_bytes + found.migration.missing_bytes
    assert held >= 3 * before.model.parameter_bytes

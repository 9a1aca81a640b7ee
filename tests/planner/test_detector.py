"""The detector: what it predicts, that it stays silent on healthy jobs, and that it finds and names what is slow."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cost_models.pipeline import CriticalPath, StageCosts, simulate
from meshwright.planner.detector import DISTRIBUTIONS, Detector, Heartbeats, JobRun, StagePredictor, workload
from meshwright.planner.zoo import interleaved, one_f_one_b, zb_h1
from meshwright.plans import Alarm, Health, RequestError, Schedule

DATA = Path(__file__).parent.parent / "data"
PATH = CriticalPath.of(one_f_one_b(4, 8))


def started(distribution: str, tokens: int, seed: int, **more: Any) -> tuple[JobRun, Detector]:
    job = JobRun(PATH, 2, tokens=tokens, distribution=distribution, seed=seed)
    off = np.exp(0.05 * np.random.default_rng(seed + 7).standard_normal(job.coefficients.shape))
    return job, Detector(PATH, 2, prior=job.coefficients * off, constant_s=job.constant_s, **more)


def alarms_of(job: JobRun, detector: Detector, steps: range, slow: dict[tuple[int, int], float]) -> list[Alarm]:
    found: list[Alarm] = []
    for step in steps:
        work, times, step_s = job.step(slow)
        found += detector.observe(step, step_s, work=work, actions_s=times).alarms
    return found


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), interleaved(2, 4, 2), zb_h1(3, 5)], ids=["1f1b", "i", "zb"])
def test_the_critical_path_is_the_simulators(schedule: Schedule) -> None:
    path = CriticalPath.of(schedule)
    rng = np.random.default_rng(0)
    costs = StageCosts(
        forward=tuple(rng.uniform(1, 2, schedule.stages)),
        input_gradient=tuple(rng.uniform(1, 2, schedule.stages)),
        weight_gradient=tuple(rng.uniform(1, 2, schedule.stages)),
        delay=0.25,
    ).complete()
    times = np.array(
        [
            [[costs.duration(k, s) for _ in range(schedule.microbatches)] for s in range(schedule.stages)]
            for k in path.kinds
        ]
    )
    transfers = np.full((2, schedule.stages - 1), 0.25)
    lengths = path.lengths(np.stack([times, 2 * times]), transfers)
    assert lengths[0] == pytest.approx(simulate(schedule, costs).makespan)
    assert lengths[1] > 1.9 * lengths[0]


def test_workloads_and_coefficients() -> None:
    assert workload([3, 4]) == (7.0, 25.0)
    predictor = StagePredictor(1, 2)
    truth = np.array([[[1e-5, 3e-10], [2e-5, 0.0]]])
    rng = np.random.default_rng(1)
    for _ in range(3):
        work = np.stack([rng.uniform(4e3, 8e3, (2, 4)), rng.uniform(1e7, 6e7, (2, 4))], axis=2)
        predictor.learn(work, np.einsum("ksc,dmc->dksm", truth, work), np.ones((2, 2), bool))
    assert predictor.coefficients == pytest.approx(truth, rel=1e-4, abs=1e-13)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_unlike_sequences_are_no_alarm(distribution: str) -> None:
    job, detector = started(distribution, 32768, 3)
    raw, errors, seen = 0, [], []
    for step in range(80):
        work, times, step_s = job.step()
        report = detector.observe(step, step_s, work=work, actions_s=times)
        assert report.alarms == ()
        errors.append(abs(report.ratio - 1))
        seen.append(step_s)
        raw += step >= 10 and step_s > 1.1 * float(np.median(seen[step - 10 : step]))
    assert np.mean(errors[20:]) < 0.012
    assert raw >= (3 if distribution != "chat" else 0)


@pytest.mark.parametrize(("factor", "within"), [(1.15, 10), (1.3, 5)])
@pytest.mark.parametrize("begin", [0, 30], ids=["from the start", "later"])
def test_a_slow_stage_is_found_and_named(factor: float, within: int, begin: int) -> None:
    for index, distribution in enumerate(("code", "documents")):
        job, detector = started(distribution, 16384, 40 + index)
        assert alarms_of(job, detector, range(begin), {}) == []
        for where in ((0, index), (1, 3 - index)):
            watched, run = copy.deepcopy(detector), copy.deepcopy(job)
            (alarm, *more) = alarms_of(run, watched, range(begin, begin + within), {where: factor})
            assert (alarm.replica, alarm.stage) == where and alarm.what == "compute" and not more
            assert alarm.slowdown == pytest.approx(factor, rel=0.05)
            assert watched.slowdowns(begin + within - 1)[where] == pytest.approx(factor, rel=0.05)
            # Once it is well again, the next time is a new alarm.
            assert alarms_of(run, watched, range(100, 112), {}) == [] and watched.slowdowns(112) == {}
            assert len(alarms_of(run, watched, range(112, 118), {where: factor})) == 1


def test_one_hiccup_is_no_alarm_and_a_slow_step_without_ranks_is() -> None:
    job, detector = started("code", 16384, 5)
    assert alarms_of(job, detector, range(20), {}) == []
    work, times, step_s = job.step()
    assert detector.observe(20, 3 * step_s, work=work, actions_s=times).alarms == ()
    assert alarms_of(job, detector, range(21, 40), {}) == []
    for step in range(40, 50):
        work, _, step_s = job.step()
        found = detector.observe(step, 1.2 * step_s, work=work).alarms
        if found:
            assert found[0].what == "step" and found[0].replica is None
            break
    else:
        pytest.fail("a step 1.2 times as long was not found")


def test_the_published_rule_is_a_mode() -> None:
    job, detector = started("code", 16384, 6, mode="paper")
    assert alarms_of(job, detector, range(20), {}) == []
    # One stage at 1.15 and 1.3 lengthens the step by less than 25 %.
    assert alarms_of(job, detector, range(20, 30), {(0, 1): 1.15}) == []
    (alarm, *_) = alarms_of(job, detector, range(30, 40), {(0, 1): 2.0})
    assert (alarm.replica, alarm.stage) == (0, 1)


def test_a_slow_link_is_told_from_a_slow_rank() -> None:
    job, detector = started("web", 8192, 8)
    rng = np.random.default_rng(0)
    found: list[Alarm] = []
    for step in range(40):
        work, times, step_s = job.step()
        transfers = 0.01 * np.exp(0.05 * rng.standard_normal((2, 3)))
        transfers[1, 2] *= 3 if step >= 30 else 1
        found += detector.observe(step, step_s, work=work, actions_s=times, transfers_s=transfers).alarms
    (alarm,) = found
    assert (alarm.what, alarm.replica, alarm.stage) == ("link", 1, 2) and 30 <= alarm.step <= 33
    assert "link of stage 2 in replica 1" in str(alarm)


@pytest.mark.parametrize("name", ["st", "se"])
def test_published_traces(name: str) -> None:
    data = np.load(DATA / f"straggler_{name}.npz")
    times, step_s = data["ticks"] * 2e-5, data["step_s"].astype(float)
    path = CriticalPath.of(one_f_one_b(times.shape[3], times.shape[4]))
    lengths = np.array([path.lengths(one).max() for one in times])
    constant = float(np.median(step_s - lengths))
    assert np.abs((lengths + constant) / step_s - 1).mean() < 0.01
    # The sequences of these traces are not known: the ranks' times are held against each other.
    detector = Detector(path, times.shape[1])
    reports = [
        detector.observe(step, float(seconds), actions_s=one)
        for step, (one, seconds) in enumerate(zip(times, step_s, strict=True))
    ]
    assert all(report.alarms == () for report in reports)
    slowed = times.copy()
    slowed[:, 1, :, 1] *= 1.4
    detector = Detector(path, times.shape[1])
    alarms = [a for i in range(8) for a in detector.observe(i, float(step_s[i]), actions_s=slowed[i]).alarms]
    if name == "se":
        # Two stages: the other rank of the pipeline cannot be told from it, so half of it is seen.
        assert {alarm.replica for alarm in alarms} == {1}
    assert (alarms[0].replica, alarms[0].stage) == (1, 1)


def test_heartbeats() -> None:
    beats = Heartbeats({"a": (0, 1), "b": (2, 3)}, period_s=1.0)
    assert beats.lost(0.0) == ()
    for now in (1.0, 2.0, 3.0, 4.0):
        beats.beat("a", now, {0: 5, 1: 5})
        if now < 2:
            beats.beat("b", now, {2: 5, 3: 5})
    assert beats.lost(4.0) == ()
    assert [alarm.device for alarm in beats.lost(4.5, step=5)] == [2, 3]
    assert beats.lost(4.6) == ()
    beats.beat("a", 5.0, {0: 6})
    assert [alarm.device for alarm in beats.lost(5.0)] == [1]
    beats.disconnected("a")
    assert [str(alarm) for alarm in beats.lost(5.0, step=6)] == ["step 6: device 0 is gone since step 6"]
    with pytest.raises(RequestError, match="one of a, b"):
        beats.beat("c", 0.0, {})


def test_health_is_read_strictly() -> None:
    health = Health.parse(("17=0", "23=0.6"), 32)
    assert health.dead == (17,) and health.slow == (23,) and health.speed(23) == 0.6 and health.speed(0) == 1.0
    assert str(health) == "17=0, 23=0.6" and Health.of({3: 1.0}).speeds == ()
    for words, message in [
        (("17",), "DEVICE=SPEED"),
        (("1=0", "1=1"), "once"),
        (("40=0",), "one of 32 devices"),
        (("1=1.5",), "0 \\(dead\\) to 1"),
    ]:
        with pytest.raises(RequestError, match=message):
            Health.parse(words, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Detector(PATH, 2, mode="loud"), "own or paper"),  # type: ignore[arg-type]
        (lambda: Detector(PATH, 2).observe(0, 1.0), "'work' or 'actions_s'"),
        (lambda: Detector(PATH, 2).observe(0, 1.0, work=np.ones((3, 8, 2))), "2 replicas first"),
        (lambda: Detector(PATH, 2).observe(0, 1.0, work=np.ones((2, 8, 2))), "something to predict from"),
        (lambda: StagePredictor(2, 4, prior=np.ones((2, 4))), "the shape"),
        (lambda: JobRun(PATH, 2, tokens=100, distribution="poems").step(), "one of code"),
    ],
)
def test_requests_that_make_no_sense(call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call()

"""Weeks of a job's life: published rates, and policies under the same events."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright import cli
from meshwright.planner.lifetime import Rates, events_of, live, load_job, transformer_job
from meshwright.planner.resilience import Workbench, healthy_arrangement, replan_job
from meshwright.planner.resilience.contingency import Contingency, canonical
from meshwright.plans import Health, Infeasible, RequestError

WEEK_S = 7 * 86400.0


def small() -> Any:
    return transformer_job("llama2-7b", tensor=2, replicas=4, stages=2, microbatches=32)


def test_published_rates() -> None:
    llama, rsc = Rates.load("llama3-405b"), Rates.load("meta-rsc-1")
    # 419 interruptions of 2,048 nodes in 54 days: one in 3.09 hours.
    assert llama.mean_between_failures_s(2048) / 3600 == pytest.approx(54 * 24 / 419, rel=2e-3)
    assert llama.device_share + llama.node_share == pytest.approx((419 - 98) / 419)
    # 16,384 GPUs of RSC-1: 1.8 hours.
    assert rsc.mean_between_failures_s(2048) / 3600 == pytest.approx(1.8, rel=0.01)
    with pytest.raises(RequestError, match="one of llama3-405b"):
        Rates.load("none")


def test_events_come_as_often_as_they_should() -> None:
    job, rates = transformer_job("llama2-13b", tensor=4, replicas=16, stages=4), Rates.load("every-30-minutes")
    events = events_of(job, rates, WEEK_S, 0)
    assert events == events_of(job, rates, WEEK_S, 0) != events_of(job, rates, WEEK_S, 1)
    dead = [event for event in events if event.speed == 0]
    assert len(dead) == pytest.approx(7 * 48, rel=0.15) and all(len(event.devices) == 1 for event in dead)
    assert all(0.3 <= event.speed <= 0.9 for event in events if event.speed)


def test_a_life_is_what_its_parts_say() -> None:
    job = small()
    rates = Rates.load("llama3-405b")
    assert live(job, rates, [], WEEK_S, "ours").goodput == live(job, rates, [], WEEK_S, "restart").goodput
    events = events_of(job, Rates.load("every-30-minutes"), 86400.0, 3)[:6]
    lives = {name: live(job, rates, events, WEEK_S, name) for name in ("restart", "drop", "resihp", "ours")}
    assert lives["restart"].stopped > 0.1 and lives["restart"].changes > 0
    assert lives["ours"].goodput >= max(life.goodput for life in lives.values()) - 1e-3
    assert all(0 <= life.goodput <= 1 and 0 <= life.stopped <= 1 for life in lives.values())


def test_plans_made_ahead_are_those_made_on_the_spot() -> None:
    job = small()
    table = Contingency.of(job, doubles=3)
    bench = Workbench(job)
    for speeds in ({0: 0.0}, {5: 0.0}, {13: 0.0}, dict.fromkeys(range(8, 16), 0.0)):
        found = table.find(speeds)
        assert found is not None
        health = Health.of(speeds)
        found.arrangement.check(job.layers)
        assert not set(found.arrangement.devices) & set(health.dead)
        now = replan_job(job, health, bench=bench)
        assert found.step_s == pytest.approx(now.step_s, rel=1e-9)
        assert bench.price(found.arrangement, health) == pytest.approx(found.step_s, rel=1e-9)
    assert table.find({0: 0.5}) is None
    assert table.find({}) is None or table.find({}).arrangement is not None  # type: ignore[union-attr]
    table.add(Health.of(dict.fromkeys(range(16), 0.0)))
    with pytest.raises(Infeasible, match="a device alive"):
        table.find(dict.fromkeys(range(16), 0.0))


def test_what_is_the_same_but_for_names() -> None:
    job = small()
    one, places = canonical(job, Health.of({9: 0.0}))
    other, _ = canonical(job, Health.of({0: 0.0}))
    assert one == other and sorted(places) == list(range(16)) and places[0] == 9
    assert canonical(job, Health.of({2: 0.0}))[0] != one
    assert healthy_arrangement(job).check(job.layers) is None


def test_jobs_from_files(tmp_path: Path) -> None:
    job, path = small(), tmp_path / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    assert load_job(str(path)) == job
    fields = json.loads(path.read_text())
    for change, message in [({"colour": 1}, "'colour'"), ({"tensor": 3}, "divide|at least"), ({"stages": "x"}, "int")]:
        path.write_text(json.dumps(fields | change))
        with pytest.raises(RequestError, match=message):
            load_job(str(path))


def test_jobs_from_text() -> None:
    job = load_job("llama3-405b:8x2x16", spares=8)
    assert job.layers == 126 and job.devices == 264 and math.isfinite(job.memory_bytes)
    for text, message in [
        ("llama9:1x1x1", "one of llama2-7b"),
        ("llama2-7b:0x1x1", "at least 1"),
        ("what", "MODEL:TPxDPxPP"),
        ("missing.json", "a JSON file"),
    ]:
        with pytest.raises(RequestError, match=message):
            load_job(text)


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(("simulate", *arguments))
        return code, *capfd.readouterr()

    words = (
        "--failures",
        "llama2-7b:2x4x2",
        "--weeks",
        "1",
        "--policies",
        "restart,ours",
        "--rates",
        "every-30-minutes",
    )
    code, text, _ = run(*words, "--no-slow", "--weeks", "0.05", "--json")
    out = json.loads(text)
    assert code == 0 and [row["policy"] for row in out["policies"]] == ["restart", "ours"] and out["devices"] == 16
    assert out["events"]["slow"] == 0
    code, text, _ = run(*words, "--weeks", "0.01")
    assert code == 0 and "goodput" in text
    for more, message in [
        (("--policies", "hope"), "'--policies' must be of restart"),
        (("--rates", "none"), "'--rates' must be one of"),
        (("--profile", "x.json"), "'--failures' must be given without"),
    ]:
        code, _, said = run(*words, *more)
        assert code == 2 and message in said

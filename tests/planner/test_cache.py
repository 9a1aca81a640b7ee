"""The cache of solved plans, and searches that start from a plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.planner import api
from meshwright.planner.api import draft, plan
from meshwright.planner.cache import Cache
from meshwright.plans.errors import RequestError
from meshwright.plans.plan import Plan


class Net(nn.Module):
    def __init__(self, width: int = 8192) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def planned(**options: object) -> Plan:
    with torch.device("meta"):
        return plan(Net(), (torch.empty(16384, 8192),), cluster="h100-sxm:4", mesh="2x2", **options)  # type: ignore[arg-type]


def choices(found: Plan) -> tuple:
    return found.nodes, found.parameters, found.predicted


def test_the_same_problem_is_not_solved_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(cache=tmp_path / "made")
    monkeypatch.setattr(api, "solve_within", lambda *_, **__: pytest.fail("solved again"))
    again = planned(cache=tmp_path / "made")
    assert choices(again) == choices(first) and again.solver.gap == first.solver.gap


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_entry_is_ignored_with_a_notice(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = planned(cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert choices(planned(cache=tmp_path)) == choices(first)
    assert "is ignored" in caplog.text and entry.read_bytes() == sound


def test_an_entry_that_lies_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = planned(cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    tree = json.loads(entry.read_bytes())
    for change in (
        {"objective_s": tree["objective_s"] / 2},
        {"choices": tree["choices"][:-1]},
        {"choices": [10**6, *tree["choices"][1:]]},
        {"bound_s": 2 * tree["objective_s"]},
        {"key": "0" * 64},
    ):
        entry.write_text(json.dumps(tree | change))
        assert choices(planned(cache=tmp_path)) == choices(first)
    assert caplog.text.count("does not solve") == 5


def test_whatever_decides_the_plan_is_in_the_key() -> None:
    keys = set()
    with torch.device("meta"):
        for width, request in (
            (8192, {}),
            (4096, {}),
            (8192, {"mesh": "4"}),
            (8192, {"memory_limit_bytes": 10**10}),
            (8192, {"optimizer": "sgd"}),
            (8192, {"constraints": ["up.weight = R,*"]}),
            (8192, {"cluster": "a100-sxm:4"}),
            (8192, {"compiled": False}),
        ):
            options = {"cluster": "h100-sxm:4", "mesh": "2x2"} | request
            prepared = draft(Net(width), (torch.empty(16384, width),), **options)  # type: ignore[arg-type]
            keys.add(Cache.key(prepared, gap=1e-3, solver="highs"))
        keys |= {Cache.key(prepared, gap=1e-4, solver="highs"), Cache.key(prepared, gap=1e-3, solver="cbc")}
    assert len(keys) == 10


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="'cache' must be a folder"):
        planned(cache=tmp_path / "file" / "folder")


def test_a_search_starts_from_a_plan() -> None:
    first = planned()
    seen: list[float] = []
    again = planned(warm=first, on_progress=lambda stage, objective, bound: seen.append(objective))
    assert choices(again) == choices(first)
    best = first.predicted.step_time_s
    assert [value for value in seen if value][0] == pytest.approx(best)
    other = planned(warm=first, constraints=["up.weight = R,R"])
    assert other.predicted.step_time_s == pytest.approx(planned(constraints=["up.weight = R,R"]).predicted.step_time_s)
    with torch.device("meta"), pytest.raises(RequestError, match="'warm' must be a plan for mesh"):
        plan(Net(), (torch.empty(16384, 8192),), cluster="h100-sxm:4", mesh="4", warm=first)

"""Arguments of a wrong kind: every public call refuses them by name, before it does anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshwright

# Calls of wrong kinds, on purpose.
mw: Any = meshwright
MODEL, X = nn.Linear(5, 8), torch.ones(6, 5)
REQUEST: dict[str, Any] = {"model": MODEL, "args": (X,), "cluster": "cpu:2"}
WRONG: list[tuple[str, Any, str]] = [
    ("model", lambda x: x, "'model' must be a torch.nn.Module"),
    ("args", X, r"'args' must be a tuple or list of the inputs, got a tensor of shape \[6, 5\]; write \(x,\)"),
    ("kwargs", [1], "'kwargs' must be a dict"),
    ("cluster", 3, "'cluster' must be a text or a Cluster, got 3"),
    ("cluster", None, "'cluster' must be a text or a Cluster, got None"),
    ("mesh", 2, "'mesh' must be a text or a Mesh"),
    ("mesh", (2,), "'mesh' must be a text or a Mesh"),
    ("constraints", [3], "'constraints' must be a list of texts"),
    ("constraints", "weight = R", "'constraints' must be a list of texts or Constraints, got the str 'weight = R'"),
    ("recipe", 3, "'recipe' must be the name"),
    ("optimizer", ["adamw"], "'optimizer' must be the name"),
    ("recompute", [], "'recompute' must be auto"),
    ("compiled", "yes", "'compiled' must be True or False"),
    ("memory_limit_bytes", "1GB", "'memory_limit_bytes' must be a positive whole number of bytes, got the str '1GB'"),
    ("memory_limit_bytes", 1.5, "'memory_limit_bytes' must be a positive whole"),
    ("memory_limit_bytes", 0, "'memory_limit_bytes' must be a positive whole"),
    ("replicate", "linear", "'replicate' must be a list of ops"),
    ("replicate", ["nosuchop"], "'replicate' must name ops of the model, got 'nosuchop'; its ops are"),
    ("rules", 3, "'rules' must be a list of OpRules"),
    ("time_limit_s", 0, "'time_limit_s' must be a positive number"),
    ("time_limit_s", float("nan"), "'time_limit_s' must be a positive number"),
    ("gap", -1, "'gap' must be a number from 0 to 1"),
    ("gap", float("inf"), "'gap' must be a number from 0 to 1"),
    ("pipeline", "x", "'pipeline' must be a whole number of ranks"),
    ("microbatches", True, "'microbatches' must be a whole number"),
    ("warm", "plan.json", "'warm' must be a Plan, .*Plan.load"),
    ("cache", 3, "'cache' must be the path"),
    ("calibration", 3, "'calibration' must be a Calibration or the path"),
    ("loss", 3, "'loss' must be a function"),
    ("on_progress", 3, "'on_progress' must be a function"),
    ("name", 3, "'name' must be a name"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_plan_refuses_by_name(name: str, value: Any, words: str) -> None:
    with pytest.raises(mw.RequestError, match=words):
        mw.plan(**{**REQUEST, name: value})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda plan: mw.apply("plan.json", MODEL, (X,)), "'plan' must be a Plan, .*Plan.load"),
        (lambda plan: mw.adapt(None, MODEL, (X,)), "'plan' must be a Plan"),
        (lambda plan: mw.explain(plan, names=3), "'names' must be a name of the plan"),
        (lambda plan: mw.check(MODEL, X, mesh="2"), "'args' must be a tuple"),
        (lambda plan: mw.check(MODEL, (3,), mesh="2"), "must be traceable, got TypeError"),
        (lambda plan: mw.check(MODEL, (X,), mesh="2", steps=0), "'steps' must be a whole number from 1 up"),
        (lambda plan: mw.check(MODEL, (X,), mesh="2", schedule="zb-h1"), "'schedule' must come with 'pipeline'"),
        (lambda plan: mw.explain_infeasible(MODEL, (X,), cluster=3), "'cluster' must be a text"),
        (lambda plan: mw.replan(plan, 3, MODEL, (X,)), "'health' must be a dict"),
        (lambda plan: mw.workload_of(plan, MODEL, (X,), dynamic=_BATCH, sequence="t"), "'sequence' must be one of b"),
        (lambda plan: mw.autoparallelize(MODEL, (X,), mesh=2), "'mesh' must be a text"),
        (lambda plan: mw.elastic(MODEL, (X,), optimizer="adamw"), "'optimizer' must be a function"),
        (lambda plan: plan.diff("plan.json"), "'other' must be a Plan"),
        (lambda plan: plan.summary("wide"), "'width' must be a whole number"),
        (lambda plan: mw.Plan.load(3), "'path' must be a path"),
        (lambda plan: mw.Plan.from_bytes("{}"), "must be given as bytes"),
        (lambda plan: mw.Mesh.parse(2), "'mesh' must be a text"),
        (lambda plan: mw.Mesh.of(2), "'shape' must be a tuple"),
        (lambda plan: mw.Constraint.parse(3, 1), "'constraint' must look like"),
    ],
)
def test_every_call_refuses_by_name(made: Any, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(mw.RequestError, match=words):
        call(made)


@pytest.fixture(scope="module")
def made() -> Any:
    return mw.plan(**REQUEST)


_BATCH = {"input": {0: torch.export.Dim("b", max=64)}}


@pytest.fixture(scope="module")
def workload(made: Any) -> Any:
    return mw.workload_of(made, MODEL, (X,), dynamic=_BATCH, sequence="b")


@pytest.mark.parametrize("size", [0, -1, 8.5, float("nan"), float("inf"), "8", None, [[1]], [1, "a"]])
def test_a_workload_has_whole_sizes(workload: Any, size: Any) -> None:
    with pytest.raises(mw.RequestError, match="'b' must be whole numbers from 1 up|must be numbers or arrays"):
        workload.seconds(b=size)
    with pytest.raises(mw.RequestError, match="'lengths' must be"):
        workload.packed_s([size])


def test_whole_sizes_are_taken_as_they_are(workload: Any, made: Any) -> None:
    assert workload.seconds(b=6) == workload.seconds(b=6.0) == pytest.approx(made.predicted.step_time_s, rel=1e-6)
    assert list(workload.seconds(b=[6, 12])) == pytest.approx([workload.seconds(b=6), workload.seconds(b=12)])
    assert workload.packed_s([2, 4]) == pytest.approx(workload.seconds(b=6))

"""The command line: what goes to standard output, which exit code, and what is said when a request is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import Infeasible, Plan, cli
from meshwright.plans import Cluster, Mesh, Model, Options, Predicted, Solver, Tensor
from meshwright.plans.plan import Memory

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        return code, *capfd.readouterr()

    return command


@pytest.fixture
def plan() -> Plan:
    memory = Memory(
        parameters_bytes=1,
        gradients_bytes=1,
        optimizer_bytes=2,
        activations_bytes=3,
        temporaries_bytes=0,
        peak_bytes=7,
        limit_bytes=None,
    )
    return Plan(
        meshwright_version="0.1.0",
        torch_version="2.13.0",
        model=Model(name="tiny", digest="0" * 64, parameters=1, parameter_bytes=4, blocks=()),
        cluster=Cluster.parse("cpu:4"),
        mesh=Mesh((2, 2), ("dp", "tp")),
        parameters=(Tensor(name="w", shape=(4, 4), dtype="float32", layout=("S(0)", "R")),),
        buffers=(),
        inputs=(),
        outputs=(),
        nodes=(),
        options=Options(
            optimizer="adamw",
            compiled=False,
            recompute="none",
            prefetch=True,
            memory_limit_bytes=None,
            constraints=(),
            seed=None,
            dynamic=(),
        ),
        predicted=Predicted(
            step_time_s=2.0,
            compute_s=1.0,
            exposed_communication_s=0.5,
            hidden_communication_s=0.0,
            optimizer_s=0.5,
            memory=memory,
        ),
        solver=Solver(status="optimal", objective_s=2.0, bound_s=2.0, gap=0.0, seconds=0.1, choices=3),
        calibration="sheet cpu",
    )


def use(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    monkeypatch.setattr(cli, "_requests", lambda: SimpleNamespace(**functions))


def test_plan(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def plan_spec(spec: str, **request: object) -> Plan:
        asked.update(request, spec=spec)
        print("noise from a model file")
        os.write(1, b"noise from a library\n")
        return plan

    use(monkeypatch, plan_spec=plan_spec)
    out = str(tmp_path / "plan.json")
    options = ["--mesh", "2x2", "--memory-limit", "1.5GiB", "--constraint", "a", "--constraint", "b", "--layers", "2"]
    code, stdout, _ = run("plan", "tiny", "--cluster", "cpu:4", *options, "-o", out, "--json")
    answer = json.loads(stdout)
    assert code == 0 and answer["plan"] == out and Plan.load(out) == plan
    assert asked["mesh"] == Mesh.parse("2x2") and asked["memory_limit_bytes"] == 3 * 2**29
    assert asked["constraints"] == ("a", "b") and asked["layers"] == 2 and asked["spec"] == "tiny"
    keys = {"status", "step_time_s", "step_time_interval_s", "memory_bytes_per_rank", "gap", "mesh", "pipeline"}
    assert keys | {"planner_cpu_s", "planner_peak_memory_bytes"} <= answer.keys()
    code, stdout, _ = run("plan", "tiny", "--cluster", "local")
    assert code == 0 and "predicted step" in stdout


def test_no_plan_is_exit_code_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_spec(spec: str, **_: object) -> Plan:
        raise Infeasible("memory binds")

    use(monkeypatch, plan_spec=plan_spec)
    code, stdout, stderr = run("plan", "tiny", "--cluster", "cpu:4", "--json")
    assert code == 3 and json.loads(stdout)["status"] == "infeasible" and "memory binds" in stderr


def test_check(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    difference = SimpleNamespace(name="w", kind="gradient", error=0.5)
    reports = [
        SimpleNamespace(equal=True, max_error=0.0, differences=(), ranks=4),
        SimpleNamespace(equal=False, max_error=0.5, differences=(difference,), ranks=4),
    ]
    use(monkeypatch, check_spec=lambda spec, mesh, **_: reports[mesh.size != 4])
    plan.save(tmp_path / "plan.json")
    code, stdout, _ = run("check", "tiny", "--plan", str(tmp_path / "plan.json"), "--json")
    assert code == 0 and json.loads(stdout) == {"equal": True, "max_error": 0.0, "differences": [], "ranks": 4}
    code, stdout, _ = run("check", "tiny", "--mesh", "2", "--json")
    row = {"name": "w", "kind": "gradient", "error": 0.5}
    assert code == 1 and json.loads(stdout)["differences"] == [row]
    code, stdout, _ = run("check", "tiny", "--mesh", "2")
    assert code == 1 and "NOT equal" in stdout


def test_show_diff_and_replay(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    plan.save(path)
    assert run("show", path)[:2] == (0, plan.summary() + "\n")
    assert run("show", path, "--json")[:2] == (0, plan.to_bytes().decode())
    assert json.loads(run("diff", path, path, "--json")[1])["same"] is True
    assert "same choices" in run("diff", path, path)[1]
    use(monkeypatch, replay_spec=lambda plan, spec, **_: plan)
    assert json.loads(run("replay", path, "tiny", "--json")[1])["same"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "tiny"], "--cluster"),
        (["plan", "tiny", "--cluster", "h100"], "'cluster' must"),
        (["plan", "tiny", "--cluster", "cpu:4", "--mesh", "0x1"], "'mesh' must"),
        (["plan", "tiny", "--cluster", "cpu:4", "--memory-limit", "much"], "'--memory-limit' must"),
        (["plan", "tiny", "--cluster", "cpu:4", "--memory-limit", "0"], "'--memory-limit' must"),
        (["plan", "tiny", "--cluster", "cpu:4", "--layers", "-1"], "--layers"),
        (["plan", "tiny", "--cluster", "cpu:4", "--time-limit", "nan"], "--time-limit"),
        (["check", "tiny"], "'--mesh' must"),
        (["check", "tiny", "--mesh", "2", "--plan", "x", "--random", "3"], "'--plan' must not"),
        (["check", "tiny", "--mesh", "2", "--ranks", "many"], "--ranks"),
        (["show", "/nowhere/plan.json"], "plan 'path' must"),
        (["show", "/dev/null"], "plan 'path' must"),
        (["nothing"], "nothing"),
    ],
)
def test_a_wrong_request_is_exit_code_2(run: Run, arguments: list[str], said: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert code == 2 and stdout == "" and said in stderr and "Traceback" not in stderr
    code, stdout, stderr = run(*arguments, "--json")
    answer = json.loads(stdout)
    assert code == 2 and answer["status"] == "refused" and answer["exit_code"] == 2
    assert answer["error"] in stderr


def test_doctor(run: Run) -> None:
    code, stdout, _ = run("doctor", "--json")
    answer = json.loads(stdout)
    names = [finding["name"] for finding in answer["findings"]]
    assert {"python", "torch", "solver highs", "cores", "memory", "gloo", "working folder"} <= set(names)
    assert code == (0 if answer["ok"] else 2)

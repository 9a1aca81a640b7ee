"""The command line: what goes to standard output, which exit code, and what is said when a request is wrong."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from meshwright import Conflict, Explanation, Infeasible, Plan, cli
from meshwright.cli_output import progress_line
from meshwright.plans import Cluster, Mesh, Model, Options, Predicted, Solver, Tensor, facts_of
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
        gathered_bytes=0,
        communication_bytes=0,
        other_bytes=0,
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
            recipe="",
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


def test_a_conflict_is_told_and_its_parts_are_in_the_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    conflict = Conflict(
        limits=("memory limit of 5 bytes per device", "constraint w = R"),
        minimal=True,
        drop=("constraint w = R",),
        least_memory_bytes=2048,
        proven_memory_bytes=2000,
    )

    def plan_spec(spec: str, **_: object) -> Plan:
        error = Infeasible(f"memory binds\n{conflict}")
        error.conflict = conflict
        raise error

    use(monkeypatch, plan_spec=plan_spec)
    code, stdout, stderr = run("plan", "tiny", "--cluster", "cpu:4", "--json")
    assert code == 3 and json.loads(stdout)["conflict"]["least_memory_bytes"] == 2048
    assert "none of them can be spared" in stderr and "2048 bytes (2.0 KiB)" in stderr


def test_a_batch_that_does_not_go_round_is_noted(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Tensor(name="args.0", shape=(6, 2), dtype="int64", layout=("S(0)", "R"))
    use(monkeypatch, plan_spec=lambda spec, **_: msgspec.structs.replace(plan, inputs=(given,)))
    assert "--global-batch 8 would give each 2" in run("plan", "tiny", "--cluster", "cpu:4")[1]
    assert json.loads(run("plan", "tiny", "--cluster", "cpu:4", "--global-batch", "6", "--json")[1])["notes"] == []


def test_progress_is_shown_on_a_terminal_only() -> None:
    terminal = io.StringIO()
    with progress_line(terminal) as on_progress:
        assert on_progress is None
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with progress_line(terminal) as on_progress:
        assert on_progress is not None
        on_progress("capture", 0.0, 0.0)
        on_progress("plan", 2.0, 1.0)
    assert "capture" in terminal.getvalue() and "best 2 s, gap 50.00%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_explain(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def explain_spec(plan: Plan, names: list[str], spec: str | None, **options: object) -> Explanation:
        asked.update(options, names=names, spec=spec)
        return Explanation(
            predicted=plan.predicted, facts=facts_of(plan, names), alternatives=(), limits=(), notes=("a note",)
        )

    use(monkeypatch, explain_spec=explain_spec)
    path = str(tmp_path / "plan.json")
    plan.save(path)
    code, stdout, _ = run("explain", path, "w", "tiny", "--more-memory", "1GiB")
    assert code == 0 and "parameter w" in stdout and "a note" in stdout
    assert asked["names"] == ["w"] and asked["spec"] == "tiny" and not asked["limits"]
    assert asked["more_memory_bytes"] == 2**30
    assert json.loads(run("explain", path, "limits", "--json")[1])["facts"] == [] and asked["limits"]
    assert run("explain", path, "nothing")[0] == 2


def test_specs(run: Run) -> None:
    names = [row["name"] for row in json.loads(run("specs", "--json")[1])["specs"]]
    code, stdout, _ = run("specs")
    assert code == 0 and "llama3-8b" in names and all(name in stdout for name in names)


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
        (["check", "tiny", "--plan", "x", "--pipeline", "2"], "'--plan' must not"),
        (["check", "tiny", "--mesh", "2", "--schedule", "1f1b"], "'--schedule' must"),
        (["check", "llama-tiny", "--pipeline", "2", "--microbatches", "1000"], "'microbatches' must"),
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

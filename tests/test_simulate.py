"""`meshwright simulate`: what it prints is replayed by a simulator of a few lines that knows nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright import cli
from meshwright.planner.pipeline import Clock, simulate_plan
from meshwright.planner.zoo import named_schedule
from meshwright.plans import Pipeline, RequestError, StageCost

Run = Callable[..., tuple[int, str, str]]

PROFILE = {
    "unit": "ms",
    "profiles": {
        # From the layer profiles published with the AdaPtis/OctoPipe simulator (guojihu-hana/SimPipe).
        "nemotron-nano-v2-9B": {
            "pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "F": {"E": 0.7589, "M": 2.6768, "-": 1.8477, "*": 1.9254, "L": 14.2155},
            "B": {"E": 2.8654, "M": 4.2984, "-": 1.909, "*": 2.4534, "L": 15.7056},
            "W": {"E": 0, "M": 1.7599, "-": 1.6866, "*": 0.6547, "L": 0.0595},
            "pp": 4,
            "microbatches": 8,
        },
        "small": {"pattern": "TTTTTTTT", "F": {"T": 1, "L": 5}, "B": {"T": 2, "L": 1}, "W": {"T": 1, "L": 1}},
    },
}
ROWS = json.loads((Path(__file__).parent / "planner" / "pipeline_rows.json").read_text())["heterogeneous"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(["simulate", *arguments])
        return code, *capfd.readouterr()

    return command


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps(PROFILE))
    return str(path)


def replay(out: dict[str, Any], p: int, m: int, f: list[float], b: list[float], w: list[float], c: float) -> float:
    """The makespan of the printed actions; every rule is checked on the printed times."""
    place, ends, last = out["placement"], {}, len(f) - 1
    for rank, row in enumerate(out["actions"]):
        free = 0.0
        for text, start, end in row:
            kind = next(letter for letter in "FIWB" if letter in text)
            stage, index = map(int, text.split(kind))
            cost = {"F": f, "I": b, "W": w, "B": [x + y for x, y in zip(b, w, strict=True)]}[kind][stage]
            assert place[stage] == rank and start >= free - 1e-6 and end - start == pytest.approx(cost, abs=1e-6)
            free = end
            ends[kind, stage, index] = start, end
    done = {(k, s, i): end for (k, s, i), (_, end) in ends.items()} | {
        ("I", s, i): end for (k, s, i), (_, end) in ends.items() if k == "B"
    }
    for (kind, stage, index), (start, _) in ends.items():
        needs = []
        if kind == "F" and stage:
            needs.append((done["F", stage - 1, index], place[stage - 1]))
        if kind in "IB":
            needs.append((done["F", stage, index], place[stage]))
            if stage < last:
                needs.append((done["I", stage + 1, index], place[stage + 1]))
        if kind == "W":
            needs.append((done["I", stage, index], place[stage]))
        assert all(start >= end + (c if rank != place[stage] else 0.0) - 1e-6 for end, rank in needs)
    for stage in range(len(f)):
        assert all(("F", stage, i) in ends and ("I", stage, i) in done for i in range(m))
        assert all(("W", stage, i) in ends or ("B", stage, i) in ends for i in range(m))
    assert len(out["actions"]) == p
    return max(end for _, end in ends.values())


def peaks(out: dict[str, Any], held: list[float]) -> list[float]:
    found = []
    for row in out["actions"]:
        amount = peak = 0.0
        for text, _, _ in row:
            kind = next(letter for letter in "FIWB" if letter in text)
            amount += {"F": 1, "I": -0.5, "W": -0.5, "B": -1}[kind] * held[int(text.split(kind)[0])]
            peak = max(peak, amount)
        found.append(peak)
    return found


@pytest.mark.parametrize("row", [*range(0, 98, 14), *(pytest.param(row, marks=pytest.mark.slow) for row in range(98))])
def test_fixed_stages_are_never_worse_than_the_public_scheduler(run: Run, tmp_path: Path, row: int) -> None:
    case = ROWS[row]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": ROWS}))
    # It ends when the schedule is proved best; the limit leaves time to compile.
    code, text, _ = run("--stage-costs", f"{tmp_path / 'rows.json'}:{row}", "--json", "--time-limit", "10")
    out = json.loads(text)
    assert code == 0 and out["status"] == "ok"
    p, m = case["p"], case["m"]
    assert replay(out, p, m, case["F"], case["B"], case["W"], case["comm"]) == pytest.approx(out["makespan"])
    assert peaks(out, [2.0] * p) == out["peak_memory_per_rank"]
    assert max(out["peak_memory_per_rank"]) <= case["max_mem"]
    assert out["lower_bound"] == out["makespan"] <= case["makespan"]


def test_the_published_example(run: Run, profile: str) -> None:
    name = f"{profile}:nemotron-nano-v2-9B"
    code, text, _ = run("--profile", name, "--schedule", "1f1b", "--tick", "0.01", "--json")
    out = json.loads(text)
    assert code == 0 and out["makespan"] == 133121
    assert out["partition"] == [14, 14, 14, 14]
    assert sum(end - start for _, start, end in out["actions"][3]) == 103456
    # Published with the example: loads 86392 84880 84728 84776.
    partition = "2,2,2,2,2,2,2,3,2,3,2,3,2,3,3,2,3,3,2,2,2,3,3,1"
    placement = "0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,0"
    code, text, _ = run(
        "--profile",
        name,
        "--partition",
        partition,
        "--placement",
        placement,
        "--tick",
        ".01",
        "--time-limit",
        "2",
        "--json",
    )
    assert code == 0 and json.loads(text)["status"] == "ok"


def test_a_profile_is_searched_and_replayed(run: Run, profile: str, tmp_path: Path) -> None:
    svg, trace = tmp_path / "picture.svg", tmp_path / "trace.json"
    arguments = ("--profile", f"{profile}:small", "--pp", "2", "--microbatches", "4", "--time-limit", "3")
    code, text, _ = run(*arguments, "--memory", "1f1b", "--svg", str(svg), "--trace", str(trace), "--json")
    out = json.loads(text)
    assert code == 0 and out["status"] == "ok" and sum(out["partition"]) == 8
    costs = {"T": (1, 2, 1), "L": (5, 1, 1)}
    f, b, w = ([sum(costs[s][part] for s in stage) for stage in out["stages"]] for part in range(3))
    assert replay(out, 2, 4, f, b, w, 0.0) == pytest.approx(out["makespan"])
    held = [2.0 * count for count in out["partition"]]
    assert peaks(out, held) == out["peak_memory_per_rank"]
    assert max(out["peak_memory_per_rank"]) <= out["memory_limit"] == 16
    assert out["lower_bound"] <= out["makespan"]
    assert svg.read_text().startswith("<svg") and "traceEvents" in json.loads(trace.read_text())
    for name in ("1f1b", "interleaved:2", "zb-h1", "zb-v", "v-half", "v-min"):
        code, text, _ = run(*arguments, "--schedule", name, "--json")
        other = json.loads(text)
        assert code == 0 and out["makespan"] <= other["makespan"]
        assert other["lower_bound"] <= other["makespan"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "one of PLAN, --profile, --stage-costs and --failures"),
        (("--profile", "{}:small", "--overhead", "nan"), 2, "must be a number from 0"),
        (("--profile", "{}:small", "--tick", "nan"), 2, "must be a number from 0"),
        (("--profile", "{}:small", "--delay", "nan", "--json"), 2, "must be a number from 0"),
        (("--profile", "{}:small", "--pp", "4", "--microbatches", "1048576"), 2, "must be at most 65536"),
        (("--failures", "llama2-13b:4x16x4", "--weeks", "1e9"), 2, "ten years"),
        (("--profile", "missing.json"), 2, "must be a JSON file"),
        (("--profile", "{}:small"), 2, "'--pp' must be given"),
        (("--profile", "{}:small", "--pp", "2", "--microbatches", "2", "--schedule", "zb"), 2, "must be one of gpipe"),
        (("--profile", "{}:none", "--pp", "2", "--microbatches", "2"), 2, "must be one of nemotron"),
        (("--profile", "{}:small", "--pp", "40", "--microbatches", "2"), 3, "use fewer ranks"),
        (("--profile", "{}:small", "--pp", "2", "--microbatches", "2", "--memory", "3"), 3, "10 more"),
        (("--profile", "{}:small", "--pp", "2", "--microbatches", "2", "--memory", "x"), 2, "positive number"),
        (("--profile", "{}:small", "--pp", "2", "--microbatches", "2", "--partition", "3,4"), 2, "sum to 8"),
        (("--stage-costs", "{}"), 2, "row with p, m, F, B and W"),
    ],
)
def test_wrong_requests(run: Run, profile: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    found, _, error = run(*(argument.replace("{}", profile) for argument in arguments))
    assert (found, message in error) == (code, True), error


def test_text(run: Run, profile: str) -> None:
    code, text, _ = run("--profile", f"{profile}:small", "--pp", "2", "--microbatches", "2", "--schedule", "gpipe")
    assert code == 0 and "rank  1 " in text and "makespan" in text and "stages          TTTT TTTTL" in text


def test_a_plan_is_simulated_by_its_own_schedule_or_another() -> None:
    cost = {"send_s": 0.5, "step_s": 2.0, "saved_bytes": 4, "held_bytes": 8, "passing_bytes": 1}
    costs = tuple(StageCost(forward_s=f, input_gradient_s=1.0, weight_gradient_s=1.0, **cost) for f in (1.0, 2.0))
    pipeline = Pipeline.of(("", "b"), named_schedule("1f1b", 2, 3), costs)
    row = {"own": simulate_plan(pipeline, None, memory_limit=None, clock=Clock(limit_s=1.0))}
    row["auto"] = simulate_plan(pipeline, "auto", memory_limit=None, clock=Clock(limit_s=1.0))
    # F0, sent, three times the longer stage, sent, B of the first, and its update.
    assert row["own"].simulation.step_time == pytest.approx(1.0 + 0.5 + 3 * 4.0 + 0.5 + 2.0 + 2.0)
    assert row["auto"].simulation.step_time <= row["own"].simulation.step_time
    with pytest.raises(RequestError, match="'--schedule' must have as many stages as the plan"):
        simulate_plan(pipeline, "interleaved:2", memory_limit=None, clock=Clock(limit_s=1.0))
    with pytest.raises(RequestError, match="must do micro-batches 0 to 1, got 0F2"):
        msgspec.structs.replace(pipeline, microbatches=2).check()
    with pytest.raises(RequestError, match="must have the costs of its stages"):
        simulate_plan(Pipeline.of(("", "b"), pipeline.order), None, memory_limit=None, clock=Clock(limit_s=1.0))

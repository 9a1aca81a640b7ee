"""Plans on real ranks: gloo processes that train as a user would, against one process. What they do is in ranks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RANKS = Path(__file__).with_name("ranks.py")
ROOT = RANKS.parent.parent
TOLERANCE = 1e-10


def on_ranks(jobs: str, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What the jobs found, by job and name."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RANKS), jobs]
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    running = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as stream:
                arguments = [*command, str(rank), str(size), str(folder)]
                running.append(subprocess.Popen(arguments, env=environment, stdout=stream, stderr=subprocess.STDOUT))
        # A rank that failed leaves the others waiting.
        until = time.monotonic() + 400
        while any(p.poll() is None for p in running) and not any(p.poll() for p in running):
            assert time.monotonic() < until, "the ranks take too long"
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()
    failed = [log for process, log in zip(running, logs, strict=True) if process.returncode > 0]
    assert not failed, failed[0].read_text(encoding="utf-8")[-3000:]
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All quick jobs on two ranks, in one process group."""
    return on_ranks("eager,lazily,clipped,accumulated,saved,resized", 2, tmp_path_factory.mktemp("two"))


def numbers(found: dict[str, Any], *, starting: str = "") -> list[float]:
    """The differences that a job found."""
    kept = [value for name, value in found.items() if type(value) is float and name.startswith(starting)]
    assert kept
    return kept


def test_autoparallelize_trains_as_one_process_does(two: dict[str, dict[str, Any]]) -> None:
    found = two["eager"]
    assert max(numbers(found)) < TOLERANCE
    assert found["same class"] and found["state dict names"] and found["the model given is left alone"]
    assert found["sharded"] > 0


def test_a_saved_plan_is_replayed_on_its_own_mesh_only(two: dict[str, dict[str, Any]]) -> None:
    found = two["eager"]
    assert max(numbers(found, starting="replayed")) < TOLERANCE
    assert found["more ranks"].startswith("ReplayError") and "2x2" in found["more ranks"]
    assert found["another mesh"].startswith("ReplayError") and "2x1" in found["another mesh"]


def test_an_error_of_the_planner_reaches_every_rank(two: dict[str, dict[str, Any]]) -> None:
    assert two["eager"]["no plan fits"].startswith("Infeasible")


def test_without_inputs_the_first_call_plans(two: dict[str, dict[str, Any]]) -> None:
    found = two["lazily"]
    assert max(numbers(found)) < TOLERANCE
    assert found["parameters too early"].startswith("RequestError") and found["state dict names"]


def test_gradients_are_clipped_by_the_norm_over_all_ranks(two: dict[str, dict[str, Any]]) -> None:
    assert max(numbers(two["clipped"])) < TOLERANCE


def test_gradients_of_two_backward_passes_are_summed(two: dict[str, dict[str, Any]]) -> None:
    assert max(numbers(two["accumulated"])) < TOLERANCE


def test_a_distributed_checkpoint_is_taken_up(two: dict[str, dict[str, Any]]) -> None:
    found = two["saved"]
    checkpoint(found)
    assert [pieces["gain"] for pieces in found["pieces gain"]] == [[1], [0]]


@pytest.mark.slow
def test_a_distributed_checkpoint_of_four_ranks_is_taken_up(tmp_path: Path) -> None:
    found = on_ranks("saved", 4, tmp_path)["saved"]
    checkpoint(found)
    assert [pieces["scale"] for pieces in found["pieces 006"]] == [[2], [2], [2], [0]]
    assert [pieces["gain"] for pieces in found["pieces gain"]] == [[1], [0], [0], [0]]


def checkpoint(found: dict[str, Any]) -> None:
    """What is loaded is what was saved, to the bit; what was saved is what one process has."""
    assert max(numbers(found, starting="trained")) < TOLERANCE
    assert max(numbers(found, starting="loaded") + numbers(found, starting="one more step")) == 0.0
    for case in ("006", "143"):
        assert any(pieces != found[f"pieces {case}"][0] for pieces in found[f"pieces {case}"])


def test_inputs_of_other_sizes_run_by_the_same_plan(two: dict[str, dict[str, Any]]) -> None:
    found = two["resized"]
    assert max(numbers(found)) < TOLERANCE and found["same plan"]
    assert "planned range of dim 0 of args.0" in found["too many"]


@pytest.mark.slow
def test_a_compiled_parallel_model_trains_as_one_process_does(tmp_path: Path) -> None:
    assert max(numbers(on_ranks("compiled", 2, tmp_path)["compiled"])) < TOLERANCE

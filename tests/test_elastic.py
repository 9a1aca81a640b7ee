"""Faults in training on real processes: nothing is lost but the step in flight; the numbers are those of one process.

What the processes do is in elastic_train.py. Every run has a watchdog: a process that hangs is a failure, not a wait.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from . import elastic_train as script
from .elastic_checks import (
    REPLANNED,
    ROOT,
    SCRIPT,
    SHARDED,
    Run,
    assembled,
    entries,
    environment,
    lean,
    prompt,
    reference,
    several,
    sound,
)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process, of the model with a batch norm and dropout."""
    return reference(script.SAMPLES, script.EPOCHS, plain=False)


def kill(who: int, step: int, at: str, **more: Any) -> dict[str, Any]:
    return {"who": who, "step": step, "at": at, **more}


def quick() -> dict[str, Any]:
    return {"plain": True, "samples": 12, "epochs": 2, "mesh": "3", "constraints": ["*.weight = R", "*.bias = R"]}


def test_training_goes_on_when_processes_are_killed(tmp_path: Path) -> None:
    found = several(tmp_path, {"run": {"nproc": 3, **quick(), "faults": [kill(0, 2, "backward")]}})["run"]
    sound(found, reference(12, 2, plain=True), samples=12, resumes=2)
    assert found.members() == [(0, 1, 2), (1, 2)]


@pytest.mark.slow
def test_split_state_moves_between_meshes(tmp_path: Path, alone: list[float]) -> None:
    faults = [kill(0, 2, "backward"), kill(2, 5, "optimizer")]
    # Small messages, so that there are several rounds of them.
    found = several(tmp_path, {"run": {**SHARDED, "chunk_bytes": 100, "faults": faults}})["run"]
    sound(found, alone, resumes=5)
    assert found.members() == [(0, 1, 2, 3), (1, 2, 3), (1, 3)]


PLACES = ("forward", "backward", "gate", "optimizer", "after")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_each_process_in_turn_is_killed_at_each_place_down_to_one(
    tmp_path: Path, alone: list[float], place: str
) -> None:
    # By the usual rule two processes would be 1x2, without replicas.
    meshes = {"4": "2x2", "3": "3x1", "2": "2x1", "1": "1x1"}
    runs = {}
    for first in (0, 2):
        # The step in which the others wait must not be one whose smaller batch they first have to capture.
        steps = (1, 4, 8) if place == "after" else (2, 5, 8)
        faults = [kill((first + i) % 4, step, place) for i, step in enumerate(steps)]
        runs[f"from {first}"] = {**SHARDED, "meshes": meshes, "faults": faults}
    for found in several(tmp_path, runs).values():
        sound(found, alone, resumes=5)
        prompt(found)
        lean(found.folder)
        assert [len(members) for members in found.members()] == [4, 3, 2, 1]


@pytest.mark.slow
def test_a_process_is_killed_while_others_regroup(tmp_path: Path, alone: list[float]) -> None:
    runs = {
        f"{who}-{phase}": {**SHARDED, "faults": [kill(3, 2, "backward"), {"who": who, "epoch": 2, "at": phase}]}
        for who, phase in ((0, "join"), (2, "agree"), (0, "plan"), (2, "move"), (0, "build"))
    }
    for found in several(tmp_path, runs).values():
        sound(found, alone, resumes=1)
        assert len(found.members()[-1]) == 2


@pytest.mark.slow
def test_hangs_and_losses_at_once(tmp_path: Path, alone: list[float]) -> None:
    few = {"hang_s": 2.5, "stall_s": 8.0}
    runs = {
        "stopped": {**SHARDED, "limits": few, "faults": [kill(0, 3, "backward", how="stop")]},
        "asleep": {**SHARDED, "limits": few, "faults": [kill(1, 3, "backward", how="sleep")]},
        "two at once": {**SHARDED, "faults": [kill(0, 3, "forward"), kill(1, 3, "forward")]},
        "slow": {**SHARDED, "limits": few, "faults": [kill(3, step, "forward", how="wait") for step in range(12)]},
        "an error of its own": {**SHARDED, "faults": [kill(2, 3, "forward", how="raise")]},
    }
    found = several(tmp_path, runs)
    sound(found["stopped"], alone, resumes=3)
    prompt(found["stopped"])
    assert "process 0 is lost: gave no sign of life for 2.5 s" in found["stopped"].said
    sound(found["asleep"], alone, resumes=3)
    # The message names the process and the collective that it did not enter (case 141).
    assert "process 1 is lost: did not enter" in found["asleep"].said
    assert "for which processes 0, 2, 3 waited" in found["asleep"].said
    sound(found["two at once"], alone, resumes=2)
    prompt(found["two at once"])
    assert len(found["two at once"].members()[-1]) == 2
    # A process that is late is not taken for lost (case 142).
    sound(found["slow"], alone)
    assert found["slow"].members() == [(0, 1, 2, 3)] and "is lost" not in found["slow"].said
    assert "a fault of its own" in found["an error of its own"].said
    assert found["an error of its own"].members()[-1] == (0, 1, 3)


@pytest.mark.slow
def test_a_slow_process_is_left_out_and_others_are_taken_up(tmp_path: Path) -> None:
    whole = ["*.weight = R", "*.bias = R", "gain = R", "norm.running_* = R"]
    runs = {
        # From the first step on; it lives on without a part.
        "slow": {"nproc": 3, "mesh": "3", "constraints": whole, "epochs": 40, "slow": 0.8, "slowed": [1, 0.0]},
        # The plan leaves one out that is well, and takes it up when another one is lost.
        "idle": {**REPLANNED, "faults": [kill(1, 2, "backward"), kill(0, 5, "backward"), kill(2, 8, "backward")]},
    }
    found = several(tmp_path, runs)
    sound(found["slow"], reference(script.SAMPLES, 40))
    assert re.search(r"process 1 works at 0\.\d\d of its speed", found["slow"].said)
    assert any(1 not in members for members in found["slow"].members())
    sound(found["idle"], reference(script.SAMPLES, script.EPOCHS), resumes=2)
    assert found["idle"].members()[-1] == (3,)


PIPELINED = {"pipeline": 2, "microbatches": 4, "size": 8, "plain": True, "every": 2}


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2-tiny", "llama-tiny"])
def test_a_pipeline_goes_on(tmp_path: Path, spec: str) -> None:
    runs = {
        # Stages with a replica each; one stage, then both replicas of one.
        "2x2": {**PIPELINED, "spec": spec, "mesh": "2", "constraints": ["*.weight = R"],
                "faults": [kill(1, 2, "midway"), kill(0, 5, "optimizer")]},
        # Without replicas: what is lost comes from the checkpoint, and a process is lost while that is read.
        "3x1": {**PIPELINED, "spec": spec, "nproc": 3, "pipeline": 3, "mesh": "1",
                "checkpoint": str(tmp_path / "saved"),
                "faults": [kill(1, 5, "midway"), {"who": 2, "epoch": 2, "at": "build"}]},
    }  # fmt: skip
    for found in several(tmp_path, runs, watchdog_s=120.0).values():
        sound(found, reference(24, 3, spec=spec, size=8), samples=24, size=8, resumes=1)


@pytest.mark.slow
def test_state_that_nobody_holds_comes_from_the_newest_complete_checkpoint(tmp_path: Path, alone: list[float]) -> None:
    # Without replicas; process 1 ends while it saves after step 6, which leaves that checkpoint incomplete.
    split = {"mesh": "4", "constraints": ["*.weight = S(0)", "*.bias = S(0)", "gain = S(0)"], "every": 3}
    folder = tmp_path / "saved"
    runs = {
        "saving": {**split, "checkpoint": str(folder), "faults": [kill(1, 5, "save")]},
        "again": {**split, "checkpoint": str(folder)},
        "without": {**split, "faults": [kill(1, 5, "backward")]},
    }
    found = several(tmp_path, runs)
    sound(found["saving"], alone, resumes=3)
    # From step 3, the last complete one, and not from 6.
    assert "epoch 2 runs from step 3" in found["saving"].said
    # A job that was done begins where it ended, and has nothing left to do.
    assert found["again"].code == 0 and "epoch 1 runs from step 12" in found["again"].said
    assert not found["again"].losses()
    assert found["without"].code == 1 and "'checkpoint' must hold what no survivor holds" in found["without"].said


@pytest.mark.slow
def test_a_process_comes_back(tmp_path: Path, alone: list[float]) -> None:
    runs = {
        "once": {**SHARDED, "pause_s": 0.3, "limits": {"respawn": 1}, "faults": [kill(2, 2, "backward")]},
        "and is lost on its way in": {
            **SHARDED,
            "pause_s": 0.3,
            "limits": {"respawn": 2},
            "faults": [kill(0, 2, "optimizer"), {"who": 4, "epoch": 3, "at": "move"}],
        },
    }
    found = several(tmp_path, runs)
    sound(found["once"], alone, resumes=7)
    assert found["once"].members() == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 3, 4)]
    sound(found["and is lost on its way in"], alone, resumes=6)
    assert found["and is lost on its way in"].members()[-1] == (1, 2, 3, 5)


@pytest.mark.slow
def test_checkpoints_written_meanwhile_hold_the_state_of_their_step(tmp_path: Path, alone: list[float]) -> None:
    # After every step: on the group that trains these would wait for each other.
    saved = tmp_path / "saved"
    given = {**SHARDED, "every": 1, "keep": 3, "checkpoint": str(saved), "faults": [kill(3, 4, "backward")]}
    found = several(tmp_path, {"run": given})["run"]
    sound(found, alone, resumes=3)
    kept = sorted(saved.iterdir(), key=lambda path: int(path.name.split(".")[0].removeprefix("step-")))
    assert [path.name.split(".")[0] for path in kept] == ["step-10", "step-11", "step-12"]
    for path in kept:
        done = path.name.split(".")[0].removeprefix("step-")
        files = sorted((tmp_path / "run").glob(f"state-*-{done}.pt"), key=lambda file: int(file.stem.split("-")[2]))
        last = files[-1].stem.split("-")[2]
        whole = assembled([file for file in files if file.stem.split("-")[2] == last])[0]
        tensors = {label: torch.empty_like(tensor) for label, tensor in whole.items()}
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load({"state": tensors}, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(tensors[label], whole[label]) for label in whole)


@pytest.mark.slow
def test_losses_in_a_row_end_the_job(tmp_path: Path) -> None:
    faults = [kill(0, 0, "forward"), {"who": 1, "epoch": 2, "at": "plan"}]
    found = several(tmp_path, {"run": {**quick(), "nproc": 3, "limits": {"fruitless": 1}, "faults": faults}})["run"]
    assert found.code == 1 and "losses in a row without a step" in found.said


def meshwright(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def until(holds: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


@contextlib.contextmanager
def supervised(folder: Path, name: str, *words: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A supervisor as a user starts it; it is ended at the latest when this is left."""
    log = folder / f"{name}.txt"
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshwright", "run", *words],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_processes_are_drained_and_added(tmp_path: Path, alone: list[float]) -> None:
    options = json.dumps({**SHARDED, "pause_s": 1.0})
    with supervised(tmp_path, "log", "--nproc", "4", str(SCRIPT), str(tmp_path), options) as (process, log):
        until(lambda: "epoch 1 runs" in log.read_text())
        address = re.search(r"at (\S+)", log.read_text())[1]  # type: ignore[index]
        assert meshwright("members", address, "--drain", "0").returncode == 0
        until(lambda: "epoch 2 runs" in log.read_text())
        assert meshwright("members", address, "--add", "1").returncode == 0
        code = process.wait(90)
    found = Run(code=code, said=log.read_text(), folder=tmp_path, entries=list(entries(tmp_path)), seconds=0.0)
    sound(found, alone, resumes=6)
    assert found.members() == [(0, 1, 2, 3), (1, 2, 3), (1, 2, 3, 4)]
    assert "is lost" not in found.said
    # Nothing is done twice for a change that was asked for.
    assert all(len(values) == len(set(values)) or len(values) <= 4 for values in found.losses().values())


@pytest.mark.slow
def test_a_machine_is_lost(tmp_path: Path, alone: list[float]) -> None:
    options = json.dumps({**SHARDED, "pause_s": 0.5})
    first = ("--nproc", "2", "--nodes", "2", "--listen", "127.0.0.1:0", "--hang-after", "3", str(SCRIPT), str(tmp_path))
    with supervised(tmp_path, "first", *first, options) as (head, log):
        until(lambda: "at 127" in log.read_text())
        address = re.search(r"at (\S+)", log.read_text())[1]  # type: ignore[index]
        other = ("--nproc", "2", "--join", address, str(SCRIPT), str(tmp_path), options)
        with supervised(tmp_path, "second", *other) as (node, _):
            until(lambda: "epoch 1 runs" in log.read_text())
            until(lambda: (tmp_path / "begun").exists())
            node.kill()
            code = head.wait(90)
    found = Run(code=code, said=log.read_text(), folder=tmp_path, entries=list(entries(tmp_path)), seconds=0.0)
    sound(found, alone)
    assert [len(members) for members in found.members()] == [4, 2]


@pytest.mark.slow
def test_the_example_goes_on(tmp_path: Path) -> None:
    example = str(ROOT / "examples/elastic.py")
    words = ("--nproc", "3", example, "--kill", "1", "--epochs", "1", "--checkpoint", str(tmp_path / "saved"))
    with supervised(tmp_path, "log", *words) as (process, log):
        assert process.wait(120) == 0, log.read_text()
    assert "step 4 " in log.read_text() and "step 15 " in log.read_text()
    assert "processes (0, 1, 2)" in log.read_text() and "processes (0, 2)" in log.read_text()

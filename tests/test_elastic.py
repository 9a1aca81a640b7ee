"""Faults in training on real processes: nothing is lost but the step in flight; the numbers are those of one process.

What the processes do is in elastic_train.py. Every run has a watchdog: a process that hangs is a failure, not a wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import default_collate

from meshwright.plans.batches import Batches

from . import elastic_train as script

SCRIPT = Path(script.__file__)
ROOT = SCRIPT.parent.parent
TOLERANCE = 1e-12
# Split over tensor parallel ranks, with a replica on each data parallel one; buffers whole there, too.
SHARDED = {
    "meshes": {"1": "1x1", "2": "1x2", "3": "3x1", "4": "2x2", "5": "5x1", "6": "3x2"},
    "constraints": ["*.weight = R,S(0)", "*.bias = R,S(0)", "gain = R,S(0)", "norm.running_* = R,*", "args.0 = S(0),R"],
}
# The same, with the meshes after a loss left to `replan`; who it leaves out is idle.
REPLANNED = {**{key: value for key, value in SHARDED.items() if key != "meshes"}, "mesh": "2x2"}


@dataclass
class Run:
    """What a run left."""

    code: int
    said: str
    folder: Path
    entries: list[dict[str, Any]]
    seconds: float

    def losses(self) -> dict[int, list[float]]:
        """By step, from every process that finished it."""
        found: dict[int, list[float]] = {}
        for entry in self.entries:
            if "loss" in entry:
                found.setdefault(entry["step"], []).append(entry["loss"])
        return found

    def members(self) -> list[tuple[int, ...]]:
        """Who trained, in the order of the epochs."""
        by_epoch = {entry["epoch"]: tuple(entry["members"]) for entry in self.entries if "loss" in entry}
        return [by_epoch[number] for number in sorted(by_epoch)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def several(folder: Path, runs: dict[str, dict[str, Any]], watchdog_s: float = 60.0) -> dict[str, Run]:
    """Runs one after another: `nproc`, `limits`, and the script's options, by name."""
    asked = [
        {
            "folder": str(folder / name),
            "nproc": options.pop("nproc", 4),
            "limits": options.pop("limits", {}),
            **({"slowed": options.pop("slowed")} if "slowed" in options else {}),
            "options": options,
            "watchdog_s": watchdog_s,
        }
        for name, options in ((name, dict(given)) for name, given in runs.items())
    ]
    listed = folder / "runs.json"
    listed.write_text(json.dumps(asked), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/elastic_runs.py"), str(listed)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 + (watchdog_s + 5) * len(runs),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: left(folder / name) for name in runs}


def left(folder: Path) -> Run:
    code, seconds = (folder / "code.txt").read_text(encoding="utf-8").split()
    said = (folder / "log.txt").read_text(encoding="utf-8")
    return Run(code=int(code), said=said, folder=folder, entries=list(entries(folder)), seconds=float(seconds))


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("log-*.jsonl")):
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def reference(
    samples: int, epochs: int, *, plain: bool = False, spec: str = "", size: int = script.SIZE
) -> list[float]:
    """The losses of one process that is fed the same global batches."""
    model, rows = script.net(plain=plain), script.data(samples)
    if spec:
        model, _, rows = script.tiny(spec, size)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = script.decay(optimizer)
    losses = []
    order = Batches(samples=samples, size=size, epochs=epochs, seed=3)
    for number in range(len(order)):
        batch = default_collate([rows[index][0] for index in order[number]])
        loss = model(*batch) if spec else script.loss_of(model(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process, of the model with a batch norm and dropout."""
    return reference(script.SAMPLES, script.EPOCHS, plain=False)


def sound(
    found: Run, alone: list[float], *, samples: int = script.SAMPLES, size: int = script.SIZE, resumes: int = 0
) -> None:
    """Every step done, with the loss of one process; each sample once per epoch; state as the donors had it."""
    assert found.code == 0, found.said[-3000:]
    assert "Traceback" not in found.said, found.said[-3000:]
    losses = found.losses()
    assert sorted(losses) == list(range(len(alone)))
    worst = max(abs(value - alone[step]) for step, values in losses.items() for value in values)
    assert worst < TOLERANCE, worst
    per_epoch = -(-samples // size)
    used = {entry["step"]: tuple(entry["samples"]) for entry in found.entries if "loss" in entry}
    for epoch in range(len(alone) // per_epoch):
        counts = Counter(i for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for i in used[step])
        assert counts == Counter(range(samples))
    plans = {(entry["epoch"], entry["digest"]) for entry in found.entries if "loss" in entry}
    assert len(plans) == len({epoch for epoch, _ in plans}), "all ranks of an epoch must have one plan"
    checked = sum(1 for _ in equal_to_donors(found.folder))
    assert checked >= resumes, found.said[-3000:]


def prompt(found: Run) -> None:
    """Survivors are out of their collective within a second of the word, and have done a step ten seconds after it."""
    words = re.findall(r"([\d.]+) meshwright: epoch (\d+): processes [\d, ]+ train \(process", found.said)
    assert words
    for text, number in words:
        told, epoch = float(text), int(number)
        out = [entry["time"] - told for entry in found.entries if entry.get("left") == epoch]
        steps = [entry["ended"] - told for entry in found.entries if entry.get("epoch") == epoch and "loss" in entry]
        assert out and max(out) < 1.0, (epoch, out)
        assert steps and min(steps) < 10.0, (epoch, steps)


def lean(folder: Path) -> None:
    """The threads of the groups of earlier epochs are gone, and with them their files."""
    for path in folder.glob("log-*.jsonl"):
        left = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if '"left"' in line]
        # The groups of the last epoch but one may still be held when the next one is left.
        threads = [entry["threads"] for entry in left[2:]]
        assert threads == sorted(threads, reverse=True), (path.name, threads)


def equal_to_donors(folder: Path) -> Iterator[str]:
    """Every piece that a process resumed with, against those that the processes had after the same step before it.

    A step that was done twice, because a checkpoint lay before it, left its state twice: one of them must be met."""
    for path in sorted(folder.glob("resume-*.pt")):
        _, who, epoch, done = path.stem.split("-")
        versions = {int(other.stem.split("-")[2]) for other in folder.glob(f"state-*-{done}.pt")}
        before = sorted(version for version in versions if version < int(epoch))
        if done == "0" or not before:
            continue
        resumed = torch.load(path, weights_only=True)
        # Ranks of a pipeline hold parts of the model; all of it is there on all of them.
        everybody = set().union(*(held_in(other) for other in folder.glob(f"resume-*-{epoch}-{done}.pt")))
        for version in before:
            known = set().union(*(held_in(other) for other in folder.glob(f"state-*-{version}-{done}.pt")))
            assert everybody == known, everybody ^ known
        wrong = [differing(resumed, sorted(folder.glob(f"state-*-{version}-{done}.pt"))) for version in before]
        assert "" in wrong, f"process {who} in epoch {epoch} after step {done}: {wrong}"
        yield path.stem


def held_in(path: Path) -> set[str]:
    """The labels of what a process held."""
    return set(torch.load(path, weights_only=True))


def differing(resumed: dict[str, Any], donors: list[Path]) -> str:
    """In what the pieces differ from those in the files."""
    whole, covered = assembled(donors)
    for label, (shape, offset, local) in resumed.items():
        if tuple(whole[label].shape) != shape or not cut(covered[label], offset, local.shape).all():
            return f"{label} of nobody"
        if not torch.equal(cut(whole[label], offset, local.shape), local):
            return label
    return ""


def assembled(paths: list[Path]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whole tensors from the pieces in the files, and which of their elements are known."""
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for path in paths:
        for label, (shape, offset, local) in torch.load(path, weights_only=True).items():
            tensor = whole.setdefault(label, torch.zeros(shape, dtype=local.dtype))
            mask = covered.setdefault(label, torch.zeros(shape, dtype=torch.bool))
            cut(tensor, offset, local.shape).copy_(local)
            cut(mask, offset, local.shape).fill_(True)
    return whole, covered


def cut(tensor: torch.Tensor, offset: tuple[int, ...], shape: Any) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, min(start, tensor.shape[dim]), length)
    return tensor


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
        # Without replicas: what is lost comes from the checkpoint.
        "3x1": {**PIPELINED, "spec": spec, "nproc": 3, "pipeline": 3, "mesh": "1",
                "checkpoint": str(tmp_path / "saved"), "faults": [kill(1, 5, "midway")]},
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

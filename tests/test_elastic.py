"""Faults in training on real processes: nothing is lost but the step in flight; the numbers are those of one process.

What the processes do is in elastic_train.py. Every run has a watchdog: a process that hangs is a failure, not a wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.plans.batches import Batches

from . import elastic_train as script

ROOT = Path(script.__file__).parent.parent
WATCHDOG_S = 170
TOLERANCE = 1e-12
# Split over tensor parallel ranks, with a replica on each data parallel one; buffers whole there, too.
SHARDED = {
    "mesh": "2x2",
    "constraints": ["*.weight = R,S(0)", "*.bias = R,S(0)", "norm.running_* = R,*", "args.0 = S(0),R"],
}


@dataclass
class Run:
    """What a run left."""

    code: int
    said: str
    folder: Path
    entries: list[dict[str, Any]]

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


def command(nproc: int, folder: Path, options: dict[str, Any], *flags: str) -> list[str]:
    words = ["-m", "meshwright", "run", "--nproc", str(nproc), *flags]
    return [sys.executable, *words, str(ROOT / "tests/elastic_train.py"), str(folder), json.dumps(options)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """A process that is gone at the end, with all that it started."""
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            words, env=environment(), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(nproc: int, folder: Path, *flags: str, **options: Any) -> Run:
    folder.mkdir(exist_ok=True)
    log = folder / "log.txt"
    with started(command(nproc, folder, options, *flags), log) as process:
        try:
            code = process.wait(WATCHDOG_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
    return Run(code=code, said=log.read_text(encoding="utf-8"), folder=folder, entries=list(entries(folder)))


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("log-*.jsonl")):
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def reference(samples: int, epochs: int, *, plain: bool) -> list[float]:
    """The losses of one process that is fed the same global batches."""
    model, rows = script.net(plain=plain), script.data(samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = script.decay(optimizer)
    losses = []
    order = Batches(samples=samples, size=script.SIZE, epochs=epochs, seed=3)
    for number in range(len(order)):
        loss = script.loss_of(model(torch.stack([rows[index][0] for index in order[number]])))
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


def sound(found: Run, alone: list[float], *, samples: int = script.SAMPLES, resumes: int = 0) -> None:
    """Every step done, with the loss of one process; each sample once per epoch; state as the donors had it."""
    assert found.code == 0, found.said[-3000:]
    assert "Traceback" not in found.said, found.said[-3000:]
    losses = found.losses()
    assert sorted(losses) == list(range(len(alone)))
    worst = max(abs(value - alone[step]) for step, values in losses.items() for value in values)
    assert worst < TOLERANCE, worst
    per_epoch = -(-samples // script.SIZE)
    used = {entry["step"]: tuple(entry["samples"]) for entry in found.entries if "loss" in entry}
    for epoch in range(len(alone) // per_epoch):
        counts = Counter(i for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for i in used[step])
        assert counts == Counter(range(samples))
    for step in used:
        assert len({entry["digest"] for entry in found.entries if entry.get("step") == step and "loss" in entry}) <= 2
    checked = sum(1 for _ in equal_to_donors(found.folder))
    assert checked >= resumes, found.said[-3000:]


def equal_to_donors(folder: Path) -> Iterator[str]:
    """Every piece that a process resumed with, against those that the processes had after the same step."""
    for path in sorted(folder.glob("resume-*.pt")):
        _, who, epoch, done = path.stem.split("-")
        before = sorted(folder.glob(f"state-*-{done}.pt"))
        if done == "0" or not before:
            continue
        whole: dict[str, torch.Tensor] = {}
        covered: dict[str, torch.Tensor] = {}
        for other in before:
            for label, (shape, offset, local) in torch.load(other, weights_only=True).items():
                tensor = whole.setdefault(label, torch.zeros(shape, dtype=local.dtype))
                mask = covered.setdefault(label, torch.zeros(shape, dtype=torch.bool))
                cut(tensor, offset, local.shape).copy_(local)
                cut(mask, offset, local.shape).fill_(True)
        resumed = torch.load(path, weights_only=True)
        assert resumed.keys() == whole.keys()
        for label, (shape, offset, local) in resumed.items():
            assert cut(covered[label], offset, local.shape).all(), f"{label} of nobody"
            assert torch.equal(cut(whole[label], offset, local.shape), local), f"{label} on {who} in epoch {epoch}"
            assert tuple(whole[label].shape) == shape
        yield path.stem


def cut(tensor: torch.Tensor, offset: tuple[int, ...], shape: Any) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, min(start, tensor.shape[dim]), length)
    return tensor


def kill(who: int, step: int, at: str, **more: Any) -> dict[str, Any]:
    return {"who": who, "step": step, "at": at, **more}


def test_training_goes_on_when_processes_are_killed(tmp_path: Path) -> None:
    options = {"plain": True, "samples": 12, "epochs": 3, "mesh": "3", "constraints": ["*.weight = R", "*.bias = R"]}
    found = run(3, tmp_path, **options, faults=[kill(0, 2, "backward"), kill(2, 4, "optimizer")])
    sound(found, reference(12, 3, plain=True), samples=12, resumes=3)
    assert found.members() == [(0, 1, 2), (1, 2), (1,)]


@pytest.mark.slow
def test_split_state_moves_between_meshes(tmp_path: Path, alone: list[float]) -> None:
    found = run(4, tmp_path, **SHARDED, faults=[kill(0, 2, "backward"), kill(2, 5, "optimizer")])
    sound(found, alone, resumes=5)
    assert found.members() == [(0, 1, 2, 3), (1, 2, 3), (1, 3)]

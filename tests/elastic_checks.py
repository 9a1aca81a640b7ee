"""What is asked of every run of elastic_train.py: the numbers of one process, state bit by bit, promptness."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
    for at, (text, number) in enumerate(words):
        told, epoch = float(text), int(number)
        out = [entry["time"] - told for entry in found.entries if entry.get("left") == epoch]
        steps = [entry["ended"] - told for entry in found.entries if entry.get("epoch") == epoch and "loss" in entry]
        if not out and not steps and at + 1 < len(words):
            continue  # the next loss replaced it before anybody entered it
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

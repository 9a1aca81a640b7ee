"""A training script with faults in it, for test_elastic.py: it records losses, state and who trained.

    meshwright run --nproc N elastic_train.py FOLDER '{"faults": [{"who": 2, "step": 5, "at": "forward"}]}'

`at`: forward, backward, gate (before optimizer.step), optimizer (in it), after, save, or a phase of the regrouping
into `epoch`. `how`: kill (the default), stop, sleep, wait (0.4 s), raise.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import meshwright as mw
from meshwright.passes import stage_executor
from meshwright.planner.training import checkpoints, pace, regroup
from meshwright.specs.load import load_spec

SAMPLES, SIZE, EPOCHS = 22, 6, 3


class Net(nn.Module):
    """Uneven dims, one element for many ranks, buffers that each forward changes, random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 7)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.norm(self.up(x))), 0.1, self.training)
        return self.down(hidden) * self.gain


def net(*, plain: bool) -> nn.Module:
    torch.manual_seed(0)
    return (nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 7)) if plain else Net()).double()


def data(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, dtype=torch.float64, generator=generator)
    return [(row, torch.tensor(index)) for index, row in enumerate(x)]


def tiny(name: str, size: int) -> tuple[nn.Module, tuple, list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]]:
    """A small published model with its loss, an example batch, and 24 samples with their numbers."""
    torch.manual_seed(0)
    model, args, _ = load_spec(name, batch=size, seq_len=8, layers=4).build()
    rows = torch.randint(0, 64, (24, 9), generator=torch.Generator().manual_seed(1))
    samples = [((row[:-1], row[1:]), torch.tensor(index)) for index, row in enumerate(rows)]
    return model.double(), args, samples


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y - 1).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return Dying(model.parameters(), lr=1e-2)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)


class Faults:
    """The faults that are to come, and this process's number once it is known."""

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self.faults, self.who, self.step, self.epoch, self.acted = faults, -1, -1, -1, -1

    def at(self, place: str) -> None:
        """Fail here if that was asked for."""
        for fault in self.faults:
            when = "epoch" if "epoch" in fault else "step"
            now = {"epoch": self.epoch, "step": self.step}[when]
            if fault["who"] == self.who and fault["at"] == place and fault[when] == now:
                how = fault.get("how", "kill")
                note({"fault": place, "who": self.who, "time": time.time()})
                if how in ("sleep", "wait"):
                    time.sleep(3600.0 if how == "sleep" else 0.4)
                elif how == "raise":
                    raise RuntimeError("a fault of its own")
                else:
                    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


class Dying(torch.optim.AdamW):
    """An optimizer in whose step a process may end."""

    def step(self, closure: Any = None) -> Any:
        faults.at("optimizer")
        found = super().step(closure)
        if job is not None and job._training.running is not None:
            dump(job, f"state-{job.number}-{job._training.running.version}-{job.done + 1}")
        return found


def note(entry: dict[str, Any]) -> None:
    with (folder / f"log-{os.environ['MESHWRIGHT_RANK']}.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def dump(job: mw.Elastic, name: str) -> None:
    """Every piece that this process holds, and where it lies by DTensor's own reckoning."""
    held = {}
    for label, tensor in job._training.tensors()[0].items():
        local, offset = tensor, (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            # `redistribute` to another mesh would have left it on the old one without a word.
            assert tensor.device_mesh.size() == job.plan.mesh.size, label
            local = tensor.to_local()
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        held[label] = (tuple(tensor.shape), tuple(offset), local.clone())
    torch.save(held, folder / f"{name}.pt")


def faulty(job_faults: Faults) -> None:
    """Let the runtime's own phases fail, too."""
    timed, save = regroup.Regroup._timed, checkpoints.dcp.save  # type: ignore[attr-defined]

    def phase(self: Any, name: str) -> Any:
        job_faults.who, job_faults.epoch = self.watch.me, self.epoch.number
        if name == "leave":
            held = {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
            note({"left": self.epoch.number, "time": time.time(), **held})
        job_faults.at(name)
        return timed(self, name)

    def saving(*args: Any, **kwargs: Any) -> Any:
        job_faults.at("save")
        return save(*args, **kwargs)

    do = stage_executor.Executor._do

    def action(self: Any, one: Any, *rest: Any) -> Any:
        # The first backward of a pipeline's rank: others are in the middle of their row, too.
        if str(one)[-2] in "BI" and job_faults.acted != job_faults.step:
            job_faults.acted = job_faults.step
            job_faults.at("midway")
        return do(self, one, *rest)

    stage_executor.Executor._do = action  # type: ignore[method-assign]
    regroup.Regroup._timed = phase  # type: ignore[method-assign]
    checkpoints.dcp.save = saving  # type: ignore[attr-defined]


def main(options: dict[str, Any]) -> None:
    global job
    faulty(faults)
    if "rarely" in options:
        pace._RARELY = options["rarely"]
    if "chunk_bytes" in options:
        regroup.transfer = functools.partial(regroup.transfer, chunk_bytes=options["chunk_bytes"])
    plain, spec, size = options.get("plain", False), options.get("spec"), options.get("size", SIZE)
    if spec is None:
        model, samples = net(plain=plain), data(options.get("samples", SAMPLES))
        example: tuple = (torch.stack([x for x, _ in samples[:SIZE]]),)
    else:
        model, example, samples = tiny(spec, size)  # type: ignore[assignment]
    if "meshes" in options:
        meshes = options["meshes"]
        options["mesh"] = lambda ranks: meshes[str(ranks)]
    keys = (
        "mesh",
        "constraints",
        "checkpoint",
        "every",
        "keep",
        "recipe",
        "pipeline",
        "microbatches",
        "schedule",
        "ahead",
        "uneven",
    )
    given = {key: options[key] for key in keys if key in options}
    job = mw.elastic(
        model, example, optimizer=adamw, scheduler=decay, timeout_s=options.get("timeout_s", 60.0),
        slow=options.get("slow", 0.0), dynamic=None if plain or spec else {"x": {0: (2, 12)}}, **given,
    )  # fmt: skip
    (folder / f"pid-{job.number}").write_text(str(os.getpid()), encoding="utf-8")
    entered = 0
    for batch, indices in job.batches(samples, size, epochs=options.get("epochs", EPOCHS), seed=3):
        faults.who, faults.step, before = job.number, job.done, (job.done, job._running.plan.digest(), job.members)
        if job._watch.epoch != entered:
            entered = job._watch.epoch
            dump(job, f"resume-{job.number}-{entered}-{job.done}")
        began = time.time()
        loss = None
        with job.step():
            faults.at("forward")
            if spec is None:
                loss = loss_of(job.model(batch))
                faults.at("backward")
                loss.backward()
            else:
                loss = job.model.step(*batch)  # type: ignore[operator]
                faults.at("backward")
            faults.at("gate")
            job.optimizer.step()
            faults.at("after")
            job.optimizer.zero_grad()
        if loss is not None and job.done > before[0]:
            note({
                "step": before[0], "loss": loss.item(), "samples": indices.tolist(), "digest": before[1],
                "members": before[2], "began": began, "ended": time.time(), "epoch": entered,
            })  # fmt: skip
        if not (folder / "begun").exists():
            (folder / "begun").touch()
        time.sleep(options.get("pause_s", 0.0))
    note({"finished": job.done})


job: mw.Elastic | None = None

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    asked = json.loads(sys.argv[2])
    faults = Faults(asked.get("faults", []))
    main(asked)

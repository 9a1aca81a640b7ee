"""The demo: plan a large model for a cluster that is not here, then train a small one on four processes that are.

    python examples/demo.py

Part one plans Llama-3 8B for 64 H100s; no weight is made and no GPU is needed. Part two plans a small Llama for four
local processes, trains it on them over gloo, and puts the losses beside those of one process.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import meshwright as mw
from meshwright.specs import load_spec

STEPS = 20
RANKS = 4
MESH = "2x2"
VOCABULARY = 256


def main() -> None:
    """Both parts."""
    torch.set_num_threads(1)
    plan_large()
    train_small()


def plan_large() -> None:
    """Print the plan of Llama-3 8B, 128 sequences of 8192 tokens a step, on 8 nodes of 8 H100s."""
    say("1. Planning Llama-3 8B for 64 H100s (8 nodes of 8)")
    model, args, kwargs = load_spec("llama3-8b", batch=128).build()  # on the meta device: no weights
    plan = mw.plan(model, args, kwargs, cluster="h100-sxm:8x8", mesh="8x8", name="llama3-8b", on_progress=Progress())
    predicted = plan.predicted
    print(plan.summary())
    print(
        f"\npredicted: {predicted.step_time_s:.2f} s a step, "
        f"{predicted.memory.peak_bytes / 2**30:.1f} GiB on the fullest device"
    )


def train_small() -> None:
    """Train a small Llama on one process and on four, and compare."""
    say(f"2. Training a small Llama for {STEPS} steps on one process and on {RANKS}")
    model, args, kwargs = small_model()
    plan = mw.plan(model, args, kwargs, cluster=f"cpu:{RANKS}", mesh=MESH, name="llama-tiny", on_progress=Progress())
    split = [tensor.name for tensor in plan.parameters if set(tensor.layout) != {"R"}]
    print(f"mesh {plan.mesh}, parameters held in pieces: {', '.join(split) or 'none'}")
    alone = train(model)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        began = time.perf_counter()
        mp.spawn(rank_main, (folder, free_port()), nprocs=RANKS)  # type: ignore[attr-defined]
        print(f"{RANKS} processes started, planned program applied, {STEPS} steps: {time.perf_counter() - began:.0f} s")
        together = torch.load(Path(folder) / "losses.pt", weights_only=True).tolist()
    compare(alone, together)


def small_model() -> tuple[nn.Module, tuple, dict]:
    """The same weights in every process: the spec is seeded."""
    return load_spec("llama-tiny", layers=2).build()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count upwards from a random number, and the next numbers as labels; the same in every process."""
    start = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(33)) % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: nn.Module) -> list[float]:
    """An ordinary training loop; it does not know whether `model` is split."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rank_main(rank: int, folder: str, port: int) -> None:
    """One process: load the plan, apply it, train."""
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    try:
        model, args, kwargs = small_model()
        losses = train(mw.apply(mw.Plan.load(Path(folder) / "plan.json"), model, args, kwargs))
        if rank == 0:
            torch.save(torch.tensor(losses, dtype=torch.float64), Path(folder) / "losses.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def compare(alone: list[float], together: list[float]) -> None:
    """The losses side by side."""
    print(f"\n{'step':>4}  {'1 process':>11}  {f'{RANKS} processes':>11}  {'difference':>10}")
    for step, (one, many) in enumerate(zip(alone, together, strict=True)):
        print(f"{step:>4}  {one:>11.7f}  {many:>11.7f}  {abs(one - many):>10.1e}")
    worst = max(abs(one - many) for one, many in zip(alone, together, strict=True))
    print(f"\nlargest difference: {worst:.1e} (float32)")
    if not worst < 1e-3:
        raise SystemExit("the losses differ by more than rounding: please report this")


class Progress:
    """Says which stage the planner is in, once per stage."""

    def __init__(self) -> None:
        self.began, self.stage = time.perf_counter(), ""

    def __call__(self, stage: str, objective: float, bound: float) -> None:
        if stage != self.stage:
            self.stage = stage
            print(f"  {time.perf_counter() - self.began:5.1f} s  {stage}", flush=True)


def say(text: str) -> None:
    """A heading."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()

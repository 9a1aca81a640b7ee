"""Are schedules as fast as predicted, in order? Five pipelines of one model on two processes over gloo.

    python benchmarks/pipeline_order.py --steps 15

Each action's time is the least measured in steps of the evenest pipeline, per block; from these the simulator predicts
all five. Measured is the least of the steps, from the first action's start to the last one's end over both ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import meshwright
from meshwright.cost_models.pipeline import StageCosts, simulate
from meshwright.passes.microbatches import microbatch
from meshwright.planner.api import draft
from meshwright.planner.fitting import solve_within
from meshwright.planner.zoo import named_schedule
from meshwright.plans import Action, Cluster, Pipeline, Plan, Schedule, TimedAction

BLOCKS, WIDTH, MICROBATCHES, ROWS = 8, 512, 8, 64
# How many blocks the first rank has; 0: as many as the second, but one micro-batch at a time.
CASES = {"one at a time, 4 + 4": 0, "1F1B, 7 + 1": 7, "1F1B, 6 + 2": 6, "1F1B, 5 + 3": 5, "1F1B, 4 + 4": 4}


class Blocks(nn.Module):
    """Equal blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x.square().mean()


def built() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return Blocks(), (torch.randn(MICROBATCHES * ROWS, WIDTH),)


def schedule_of(first: int) -> Schedule:
    """1F1B, or micro-batches that wait for each other."""
    if first:
        return named_schedule("1f1b", 2, MICROBATCHES)
    rows = [[Action(rank, kind, m) for m in range(MICROBATCHES) for kind in "FB"] for rank in range(2)]
    return Schedule(microbatches=MICROBATCHES, placement=(0, 1), actions=tuple(tuple(row) for row in rows))


def plan_of(first: int) -> Plan:
    model, args = built()
    prepared = draft(
        model, *microbatch(args, {}, MICROBATCHES), cluster="cpu:1", mesh="1", recompute="none", whole=True
    )
    plan = prepared.write(solve_within(prepared))
    pipeline = Pipeline.of(("", f"blocks.{first or BLOCKS // 2}"), schedule_of(first))
    return msgspec.structs.replace(plan, pipeline=pipeline, cluster=Cluster.parse("cpu:2"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        for index, first in enumerate(CASES.values()):
            plan_of(first).save(Path(folder) / f"{index}.json")
        probe.close()
        mp.spawn(measure, (folder, port, steps), nprocs=2)  # type: ignore[attr-defined]
        found = torch.load(Path(folder) / "found.pt", weights_only=False)
    costs = {kind: least(found[-1], kind) for kind in "FB"}
    print(f"per block: F {costs['F'] * 1e3:.2f} ms, B {costs['B'] * 1e3:.2f} ms\n")
    print(f"{'pipeline':<22} {'predicted':>10} {'measured':>10}")
    order = []
    for (name, first), steps_of in zip(CASES.items(), found, strict=True):
        sizes = (first or BLOCKS // 2, BLOCKS - (first or BLOCKS // 2))
        both = {k: tuple(costs[k] * size for size in sizes) for k in "FB"}
        stages = StageCosts(forward=both["F"], input_gradient=both["B"], weight_gradient=(0.0, 0.0))
        predicted = simulate(schedule_of(first), stages).makespan
        measured = min(max(t.end for row in rows for t in row) for rows in steps_of)
        order.append((predicted, measured))
        print(f"{name:<22} {predicted * 1e3:>7.1f} ms {measured * 1e3:>7.1f} ms")
    same = sorted(order) == sorted(order, key=lambda pair: pair[1])
    print("\nthe measured order is the predicted one" if same else "\nthe measured order is NOT the predicted one")


def least(steps: list[list[list[TimedAction]]], kind: str) -> float:
    """Seconds of an action of the evenest pipeline, per block."""
    times = [t.end - t.start for rows in steps for t in rows[0] if t.action.kind == kind]
    return min(times) / (BLOCKS / 2)


def measure(rank: int, folder: str, port: int, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    model, args = built()
    models: list[Any] = [
        meshwright.apply(Plan.load(Path(folder) / f"{index}.json"), model, args) for index in range(len(CASES))
    ]
    found: list[list[Any]] = [[] for _ in models]
    for step in range(steps + 1):
        # By turns, so that what else the machine does meets all alike.
        for index, one in enumerate(models):
            dist.barrier()
            one.step(*args)
            rows = one.timelines()
            if step:
                found[index].append(rows)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

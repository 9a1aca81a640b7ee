"""Predicted against measured training steps on this machine: eight models, on one process and on two with three plans.

    meshwright calibrate -o here.json
    python benchmarks/steps_here.py here.json [MODEL ...] [--out rows.json]

Float32 on CPUs, not compiled, AdamW. As in the calibration, one process is timed by its processor time (other work on
the machine hardly changes it) and the middle of its repeats counts, two by the clock on the wall and the least counts;
plans of one model take turns. Two processes need both cores: with a load above 0.5 their time says nothing. What the
first rank works then, transfers included, is the least that a quiet machine takes; it hardly depends on the load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import meshwright as mw
from meshwright.planner.checking.gloo import free_port
from meshwright.specs import gpt2, llama, mixtral, vit

RECIPES = ("ddp", "fsdp", "tp")
Call = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor] | None]
F32 = torch.float32
SIZES: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "dtype": F32}


def _square(out: Tensor) -> Tensor:
    return out.square().mean()


def _mlp(width: int, depth: int, rows: int) -> Call:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 64)), (torch.randn(rows, width),), _square


def _spec(module: Any, batch: int, **config: Any) -> Call:
    model = module.MODEL(module.CONFIG(**config))
    model.init_weights()
    return model, model.example_inputs(batch), None


MODELS: dict[str, Callable[[], Call]] = {
    "mlp": lambda: _mlp(512, 4, 512),
    "mlp-wide": lambda: _mlp(1024, 2, 256),
    "llama": lambda: _spec(
        llama, 8, vocab_size=1024, dim=256, n_layers=4, ffn_dim=512, seq_len=128,
        **SIZES | {"n_heads": 8, "n_kv_heads": 4}
    ),
    "llama-deep": lambda: _spec(llama, 4, vocab_size=256, dim=128, n_layers=8, ffn_dim=256, seq_len=64, **SIZES),
    "llama-long": lambda: _spec(
        llama, 2, vocab_size=256, dim=128, n_layers=2, ffn_dim=256, seq_len=512, **SIZES
    ),
    "gpt2": lambda: _spec(
        gpt2, 8, vocab_size=2048, dim=192, n_layers=4, n_heads=6, max_positions=256, seq_len=128, dtype=F32
    ),
    "vit": lambda: _spec(
        vit, 16, image_size=32, patch_size=4, dim=192, n_layers=4, n_heads=6, mlp_dim=384, n_classes=10, dtype=F32
    ),
    "mixtral": lambda: _spec(
        mixtral, 8, vocab_size=512, dim=128, n_layers=2, ffn_dim=256, seq_len=64, n_experts=4, **SIZES
    ),
}  # fmt: skip


def built(name: str) -> Call:
    torch.manual_seed(0)
    return MODELS[name]()


def planned(name: str, ranks: int, recipe: str | None, calibration: str) -> mw.Plan:
    model, args, loss = built(name)
    return mw.plan(model, args, cluster=f"cpu:{ranks}", mesh=str(ranks), loss=loss, recipe=recipe, compiled=False,
                   recompute="none", calibration=calibration, name=name)  # fmt: skip


def rank_main(rank: int, ranks: int, port: int, plans: list[tuple[str, bytes]], steps: int, out: str) -> None:
    """Seconds of `steps` steps of each plan by the clock on the wall, and by the processor time of rank 0's threads.

    The plans of one model take turns, so that a busy moment of the machine hits all of them alike.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found: list[list[tuple[float, float]]] = []
    for name, group in itertools.groupby(plans, key=lambda pair: pair[0]):
        runs = [_prepared(name, data) for _, data in group]
        times: list[list[tuple[float, float]]] = [[] for _ in runs]
        for turn in range(steps + 2):
            for (parallel, args, optimizer), row in zip(runs, times, strict=True):
                dist.barrier()
                wall, worked = time.perf_counter(), time.process_time()
                parallel(*args).backward()
                optimizer.step()
                if turn > 1:
                    row.append((time.perf_counter() - wall, time.process_time() - worked))
                optimizer.zero_grad()
        found += times
        if rank == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _prepared(name: str, data: bytes) -> tuple[Any, tuple[Tensor, ...], torch.optim.Optimizer]:
    model, args, loss = built(name)
    parallel = mw.apply(mw.Plan.from_bytes(data), model, args, loss=loss)
    return parallel, args, torch.optim.AdamW(parallel.parameters(), lr=1e-4)


def measured(plans: list[tuple[str, bytes]], ranks: int, steps: int, out: Path) -> list[list[tuple[float, float]]]:
    mp.spawn(rank_main, (ranks, free_port(), plans, steps, str(out)), nprocs=ranks)  # type: ignore[attr-defined]
    return json.loads(out.read_text(encoding="utf-8"))


def report(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        error = row["predicted_s"] / row["measured_s"] - 1
        low, high = row["interval_s"]
        inside = "in" if low <= row["measured_s"] <= high else "out"
        predicted, seen, middle = (1e3 * row[key] for key in ("predicted_s", "measured_s", "middle_s"))
        lines.append(
            f"{row['model']:<11} {row['ranks']} {row['plan']:<5} predicted {predicted:8.2f} ms  measured {seen:8.2f} "
            f"(middle {middle:8.2f}, processor {1e3 * row['processor_s']:8.2f})  {error:+6.1%}  {inside} of its "
            f"interval, load {row['load']:.1f}"
        )
    for key, name in (("measured_s", "time"), ("processor_s", "processor time")):
        errors = [abs(row["predicted_s"] / row[key] - 1) for row in rows]
        lines.append(f"{name}: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, {len(rows)} rows")
        lines.append(order(rows, key))
    return "\n".join(lines)


def order(rows: list[dict[str, Any]], key: str) -> str:
    """How many pairs of plans of one model are as predicted, of those that differ by more than 15 %."""
    pairs = wrong = 0
    for a, b in itertools.combinations(rows, 2):
        if a["model"] == b["model"] and a["ranks"] == b["ranks"]:
            ratio = a[key] / b[key]
            if max(ratio, 1 / ratio) > 1.15:
                pairs += 1
                wrong += (ratio > 1) != (a["predicted_s"] > b["predicted_s"])
    return f"order: {pairs - wrong} of {pairs} pairs of plans that differ by more than 15 % are as predicted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calibration")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", default="steps_here.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for ranks in given.ranks:
        ways: tuple[str | None, ...] = (None,) if ranks == 1 else RECIPES
        made = [(n, w, planned(n, ranks, w, given.calibration)) for n in given.models or MODELS for w in ways]
        times = measured(
            [(n, p.to_bytes()) for n, _, p in made], ranks, given.steps, Path(given.out).with_suffix(".tmp")
        )
        for (name, way, plan), taken in zip(made, times, strict=True):
            walls, worked = zip(*taken, strict=True)
            rows.append({"model": name, "ranks": ranks, "plan": way or "whole",
                         "measured_s": statistics.median(worked) if ranks == 1 else min(walls),
                         "middle_s": statistics.median(walls), "processor_s": statistics.median(worked),
                         "load": os.getloadavg()[0], "predicted_s": plan.predicted.step_time_s,
                         "interval_s": plan.predicted.step_time_interval_s,
                         "predicted": {"compute_s": plan.predicted.compute_s, "optimizer_s": plan.predicted.optimizer_s,
                                       "exposed_s": plan.predicted.exposed_communication_s}})  # fmt: skip
        Path(given.out).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    sys.stdout.write(report(rows) + "\n")


if __name__ == "__main__":
    main()

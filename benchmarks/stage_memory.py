"""Predicted memory of pipelines against what their ranks really allocate: models by schedules.

    python benchmarks/stage_memory.py [--rows FILE] [MODEL[:SCHEDULE] ...]

Each pipeline rank runs its row of the schedule as a user would have it (`model.step`, then AdamW), twice, alone in a
process group that carries no data; what it receives is made as it would be. Printed: predicted bytes of the fullest
rank, measured bytes of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

from memory_models import MODELS, loss_for
from rank_memory import Storages, fill, group_of, optimizer_of, rules_aside

import meshwright
from meshwright.passes.capture import capture
from meshwright.passes.microbatches import microbatches
from meshwright.passes.pipeline_runtime import parallelize_pipeline
from meshwright.passes.trees import flatten_call
from meshwright.planner.checking.check import default_loss
from meshwright.plans.plan import Plan

SCHEDULES = ("1f1b", "zb-h1", "interleaved:2")
_MODELS = ("llama", "gpt2", "bert", "vit")
_MICROBATCHES = 4


def measured(name: str, plan: Plan, rank: int, steps: int = 2) -> int:
    """Peak bytes of the first process of the pipeline rank `rank`."""
    assert plan.pipeline is not None
    model, args, kwargs = MODELS[name][0]()
    tensors, tree = flatten_call(args, kwargs)
    one = tree.build(microbatches(tensors, tree, plan.pipeline.microbatches)[0])
    loss = loss_for(name) or default_loss
    captured = capture(model, *one, loss=loss, recompute=plan.options.recompute)
    shape = (plan.pipeline.ranks, *plan.mesh.shape)
    with group_of(plan.pipeline.ranks * plan.mesh.size, rank * plan.mesh.size):
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", *plan.mesh.axis_names))
        parallel: Any = parallelize_pipeline(model, captured, plan, grid, loss=loss)
        with Storages() as storages, rules_aside(storages):
            fill(parallel)
            batch = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
            given, named = tree.build(batch)
            trained = [p for p in parallel.parameters() if isinstance(p, DTensor) and p.requires_grad]
            optimizer = optimizer_of(plan.options.optimizer, False)(trained) if trained else None
            for _ in range(steps):
                parallel.step(*given, **named)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
        return storages.peak


def row(name: str, schedule: str) -> dict[str, Any]:
    """Predicted and measured bytes of one model and schedule on two pipeline ranks of two devices."""
    model, args, kwargs = MODELS[name][0]()
    plan = meshwright.plan(
        model, args, kwargs, cluster="cpu:4", mesh="2", pipeline=2, microbatches=_MICROBATCHES, schedule=schedule,
        loss=loss_for(name), compiled=False, time_limit_s=10,
    )  # fmt: skip
    assert plan.pipeline is not None
    real = [measured(name, plan, rank) for rank in range(plan.pipeline.ranks)]
    told = plan.predicted.memory.peak_bytes
    return {"model": name, "schedule": schedule, "predicted": told, "measured": real, "ratio": told / max(real)}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="the file that rows are added to")
    parser.add_argument("names", nargs="*", default=[f"{m}:{s}" for m in _MODELS for s in SCHEDULES])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for text in given.names:
        name, _, schedule = text.partition(":")
        for each in (schedule,) if schedule else SCHEDULES:
            found = row(name, each)
            print(json.dumps(found), flush=True)
            if given.rows is not None:
                with given.rows.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

"""Predicted memory against what a rank really allocates, over models and plans (how it is counted: rank_memory.py).

    python benchmarks/memory.py [--kind counted|profiled|compiled] [NAME ...]

Each model is planned on its mesh; the plans are the chosen one and random ones with each way to recompute. Prints a
line per model, predicted over measured, and the least and the largest of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from rank_memory import measure

from meshwright.planner.api import draft
from meshwright.planner.fitting import solve_within
from meshwright.planner.verify import random_plan
from meshwright.specs import load_spec

CASES = Path(__file__).parent.parent / "tests" / "cases"
# Built-in specs with one layer, and files of tests/cases; the mesh of each. Three devices make pieces uneven.
MODELS = {
    "gpt2-tiny": "2x2", "llama-tiny": "2", "qwen3-tiny": "2", "vit-tiny": "3", "mixtral-tiny": "2",
    "008_heads3": "2", "021_fused_gate_up": "4", "030_batchnorm_train": "3", "067_resnet_stem": "2",
    "069_unet_upsample": "2", "071_ssm_python_loop": "2", "077_moe_capacity_drop": "2", "091_lora_frozen_base": "2x2",
    "104_ce_ignore_uneven": "3", "107_ce_soft_targets_kl": "2", "113_nn_transformer_layer": "2",
}  # fmt: skip
# How the backward recomputes, and the seed of a random plan; without one the plan is the chosen one.
PLANS = (("pointwise", None), ("none", 1), ("pointwise", 2), ("block", 3))


def built(name: str) -> tuple[nn.Module, tuple, dict[str, Any]]:
    """The model called `name`, its inputs."""
    if not name[0].isdigit():
        return load_spec(name, layers=1).build()
    spec = importlib.util.spec_from_file_location(name, CASES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()


def ratios(name: str, mesh: str, kind: str) -> list[float]:
    """Predicted over measured bytes of each plan, on the fullest of the first and the last rank."""
    devices = 1
    for size in mesh.split("x"):
        devices *= int(size)
    found = []
    for recompute, seed in PLANS:
        model, args, kwargs = built(name)
        prepared = draft(
            model, args, kwargs, cluster=f"cpu:{devices}", mesh=mesh, recompute=recompute, whole=True,
            compiled=kind == "compiled",
        )  # type: ignore[arg-type]  # fmt: skip
        if seed is None:
            plan = prepared.write(solve_within(prepared, time_limit_s=20))
        else:
            plan = random_plan(prepared, seed)
        ranks = {0} if kind == "compiled" else {0, devices - 1}
        real = max(measure(kind, model, prepared.captured, plan, rank=rank) for rank in ranks)
        found.append(plan.predicted.memory.peak_bytes / real)
    return found


def main() -> None:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("counted", "profiled", "compiled"), default="counted")
    parser.add_argument("names", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = [f"random {seed}, {mode}" if seed else f"chosen, {mode}" for mode, seed in PLANS]
    print(f"| model | mesh | {' | '.join(heads)} | CPU s |")
    print(f"|{'---|' * (len(heads) + 3)}")
    everything: list[float] = []
    for name in given.names:
        began = time.process_time()
        found = ratios(name, MODELS[name], given.kind)
        everything += found
        cells = " | ".join(f"{ratio:.3f}" for ratio in found)
        print(f"| {name} | {MODELS[name]} | {cells} | {time.process_time() - began:.0f} |", flush=True)
    print(f"\nleast {min(everything):.3f}, most {max(everything):.3f}, of {len(everything)}")


if __name__ == "__main__":
    main()

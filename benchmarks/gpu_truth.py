"""One GPU: calibrate, then predict and measure training steps and kernels that the calibration was not fitted on.

    python benchmarks/gpu_truth.py --out truth.json            # at most 8 minutes on one GPU
    python benchmarks/gpu_truth.py --tiny --out truth.json     # the same logic with tiny sizes on a CPU

Steps are those of planned models on one rank, not compiled and compiled, with AdamW, timed on the wall after a
synchronisation; the middle of the repeats counts. What does not fit in the time is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.cost_models import Calibration
from meshwright.cost_models.fitting import predicted_s
from meshwright.planner.calibrate import calibrate
from meshwright.planner.calibrate.clock import take
from meshwright.planner.calibrate.sweeps import attention_case, product_case, streamed_case
from meshwright.planner.checking.gloo import free_port
from meshwright.specs import gpt2, llama, mixtral, vit

LIMIT_S = 460.0
# Shapes that no sweep of the calibration has: m, n, k, batch; batch, heads, queries, keys, head size, causal; elements.
PRODUCTS = ((3072, 5120, 2560, 1), (6144, 768, 3072, 1), (384, 11008, 4096, 1), (1536, 1536, 96, 24))
ATTENTIONS = ((2, 24, 3072, 3072, 128, 1), (16, 12, 1024, 1024, 64, 1), (64, 12, 197, 197, 64, 0))
STREAMS = (3 << 20, 3 << 24, 3 << 26)
TINY = 16
Call = tuple[nn.Module, tuple[Tensor, ...]]
LLAMA = {"vocab_size": 32000, "dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "head_dim": 64}
MOE = {"vocab_size": 32000, "dim": 1024, "n_layers": 2, "n_heads": 16, "n_kv_heads": 8, "head_dim": 64}
WIDE = {"dim": 768, "n_layers": 12, "n_heads": 12}
MODELS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "llama-1b": (llama, 2, {**LLAMA, "ffn_dim": 8192, "seq_len": 2048}),
    "gpt2": (gpt2, 8, {**WIDE, "vocab_size": 50304, "max_positions": 1024, "seq_len": 1024}),
    "vit": (vit, 64, {**WIDE, "image_size": 224, "patch_size": 16, "mlp_dim": 3072, "n_classes": 1000}),
    "moe-block": (mixtral, 4, {**MOE, "ffn_dim": 3584, "seq_len": 1024, "n_experts": 8}),
}  # fmt: skip
TINY_SIZES = {"vocab_size": 128, "dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 32, "ffn_dim": 64,
              "seq_len": 32, "max_positions": 32, "image_size": 16, "patch_size": 8, "mlp_dim": 64, "n_classes": 8,
              "n_experts": 2}  # fmt: skip


def built(name: str, device: str, *, tiny: bool) -> Call:
    """A model with weights and its inputs on `device`."""
    module, batch, sizes = MODELS[name]
    if tiny:
        batch, sizes = 2, {key: TINY_SIZES[key] for key in sizes}
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = module.MODEL(module.CONFIG(**sizes, dtype=dtype))
        model.init_weights()
        return model, model.example_inputs(batch)


def kernels(calibration: Calibration, device: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Kernels of shapes that were not fitted on, measured and predicted."""
    dtype, least = ("float32" if device == "cpu" else "bfloat16"), TINY if tiny else 1
    cases = [product_case(device, dtype, *[max(8, n // least) for n in s[:3]], s[3], form=at % 3)
             for at, s in enumerate(PRODUCTS)]  # fmt: skip
    for b, h, q, kv, d, causal in ATTENTIONS:
        cases += attention_case(device, dtype, (max(1, b // least), h, q // least, kv // least, d, causal))
    cases += [streamed_case(n // least**2, device) for n in STREAMS]
    rows = take(cases, rounds=3 if tiny else 15, device=device)
    priced = calibration.device()
    return [
        row_of(f"{row.kind} {'x'.join(map(str, row.sizes))}", row.measured_s,
               predicted_s(priced, row, synchronous=device == "cpu"))
        for row in rows
    ]  # fmt: skip


def row_of(name: str, measured_s: float, expected_s: float) -> dict[str, Any]:
    """One line of the result."""
    return {"name": name, "measured_s": measured_s, "predicted_s": expected_s, "error": expected_s / measured_s - 1.0}


def step(
    calibration: Calibration, name: str, device: str, *, tiny: bool, compiled: bool, repeats: int
) -> dict[str, Any]:
    """A training step of one model, measured and predicted."""
    model, args = built(name, device, tiny=tiny)
    plan = mw.plan(model, args, cluster=f"{calibration.sheet}:1", mesh="1", compiled=compiled, recompute="none",
                   calibration=calibration, name=name)  # fmt: skip
    parallel = mw.apply(plan, model, args)
    run = torch.compile(parallel) if compiled else parallel
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5)
    times = []
    for _ in range(repeats + 3):
        _finish(device)
        began = time.perf_counter()
        run(*args).backward()
        optimizer.step()
        _finish(device)
        times.append(time.perf_counter() - began)
        optimizer.zero_grad()
    row = row_of(
        f"{name} {'compiled' if compiled else 'eager'}", statistics.median(times[3:]), plan.predicted.step_time_s
    )
    low, high = plan.predicted.step_time_interval_s or (0.0, 0.0)
    return {**row, "interval_s": [low, high], "inside": low <= row["measured_s"] <= high}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean, median and largest absolute error."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "rows": len(rows),
        "mean": statistics.mean(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
    }


def truth(given: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, as far as the time allows."""
    began, device = time.perf_counter(), "cpu" if given.tiny else "cuda"
    if given.calibration is not None:
        found = Calibration.load(given.calibration)
    else:
        found = calibrate(sheet="cpu" if given.tiny else None, ranks=1, quick=given.tiny, compiled=not given.tiny,
                          on_progress=lambda stage, *_: say(stage))  # fmt: skip
    result: dict[str, Any] = {"calibration": found.cite(), "families": [f.name for f in found.families]}
    result["kernels"] = kernels(found, device, tiny=given.tiny)
    result["steps"], result["left_out"] = [], []
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1,
                            init_method=f"tcp://127.0.0.1:{free_port()}")  # fmt: skip
    try:
        for compiled in (False,) if given.tiny else (False, True):
            for name in given.models or MODELS:
                label = f"{name} {'compiled' if compiled else 'eager'}"
                if time.perf_counter() - began > LIMIT_S - (90.0 if compiled else 40.0):
                    result["left_out"].append(label)
                    continue
                say(label)
                repeats = 3 if given.tiny else 8
                result["steps"].append(step(found, name, device, tiny=given.tiny, compiled=compiled, repeats=repeats))
                write(given.out, result)
    finally:
        dist.destroy_process_group()
    result["errors"] = {key: summary(result[key]) for key in ("kernels", "steps") if result[key]}
    result["seconds"] = time.perf_counter() - began
    return result


def write(path: str, result: dict[str, Any]) -> None:
    """Put what is known so far at `path`."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as stream:
        json.dump(result, stream, indent=1)
    os.replace(f"{path}.tmp", path)


def main() -> int:
    """Run it; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--out", default="gpu_truth.json")
    parser.add_argument("--calibration", help="take this file and do not calibrate")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, to try the logic")
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in MODELS]
    if unknown or not (given.tiny or torch.cuda.is_available()):
        sys.stderr.write(
            f"unknown models {unknown}\n" if unknown else "no GPU here; --tiny tries the logic on the CPU\n"
        )
        return 2
    result = truth(given, lambda text: sys.stderr.write(f"{text}\n") and None)
    write(given.out, result)
    for row in (*result["kernels"], *result["steps"]):
        sys.stdout.write(f"{row['name']:<44} measured {1e3 * row['measured_s']:10.3f} ms  predicted "
                         f"{1e3 * row['predicted_s']:10.3f} ms  {row['error']:+7.1%}\n")  # fmt: skip
    sys.stdout.write(json.dumps(result["errors"]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

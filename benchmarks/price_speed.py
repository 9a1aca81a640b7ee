"""How fast prices are: single collectives, the step of Llama-3 70B as a recipe and as a captured program. Processor
time, least of several.

python benchmarks/price_speed.py [--captured]    (the last takes a minute, for planning all 80 layers)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import meshwright as mw
from meshwright.cost_models.collectives import axis_collective_s
from meshwright.cost_models.links import axis_link
from meshwright.cost_models.recipes import Recipe, recipe_step
from meshwright.cost_models.stacks import find_stack, load_stacks
from meshwright.cost_models.systems import find_system, load_systems
from meshwright.cost_models.transformers import find_transformer, load_transformers
from meshwright.plans.clusters import Cluster
from meshwright.plans.meshes import Mesh
from meshwright.specs import load_spec

LAYERS: int | None = None  # all


def seconds(run: Callable[[], object], times: int, repeats: int = 7) -> float:
    found = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(times):
            run()
        found.append((time.process_time() - began) / times)
    return min(found)


def captured() -> str:
    """The step of all 80 layers, as planned for FSDP over 32 by tensor parallelism over 8, at other sizes."""
    spec = load_spec("llama3-70b", batch=256, seq_len=8192, layers=LAYERS)
    model, args, kwargs = spec.build()
    sizes = {name: {0: "batch"} for name in ("tokens", "labels")}
    named = mw.plan(model, args, kwargs, cluster="h100-sxm:32x8", mesh="32x8", recipe="fsdp+tp", loss=spec.loss)
    began = time.process_time()
    workload = mw.workload_of(named, model, args, kwargs, dynamic=sizes, loss=spec.loss)
    made = time.process_time() - began
    began = time.process_time()
    predicted = workload.seconds(batch=256)
    first = time.process_time() - began
    each = seconds(lambda: workload.seconds(batch=512), 5)
    return (
        f"Llama-3 70B captured, {len(workload.moves):,} moves: {1e3 * each:.1f} ms a price, first {1e3 * first:.0f}"
        f" ({made:.0f} s of captures before); {predicted:.2f} s a step, {named.predicted.step_time_s:.2f} planned\n"
    )


def main() -> None:
    if "--captured" in sys.argv[1:]:
        sys.stdout.write(captured())
    axis = axis_link(Cluster.parse("h100-sxm:8x8"), Mesh.parse("64"), 0)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "point_to_point"):
        each = seconds(lambda kind=kind: axis_collective_s(kind, 1e8, axis), 20_000)
        sys.stdout.write(f"{kind:<16} {1 / each:12,.0f} prices a second\n")
    model, system = find_transformer(load_transformers(), "Llama-3 70B"), find_system(load_systems(), "H100")
    assert model is not None and system is not None
    for name, recipe in {
        "fsdp over 256": Recipe(devices=256, seq_len=8192, micro_batch=1, global_batch=256, shard="full"),
        "tp 8, pp 4, 5 chunks": Recipe(
            devices=256, seq_len=8192, micro_batch=1, global_batch=256, tp=8, pp=4, virtual=5
        ),
    }.items():
        stack = find_stack(load_stacks(), "torchtitan" if recipe.shard == "full" else "megatron-lm")
        each = seconds(lambda recipe=recipe, stack=stack: recipe_step(model, recipe, system, stack), 20)
        sys.stdout.write(f"Llama-3 70B, {name}: {1e3 * each:.1f} ms a price\n")


if __name__ == "__main__":
    main()

"""The chosen plan against every recipe, predicted seconds of a step under the same memory limit.

    python benchmarks/recipes.py llama3-8b 64 -o rows.jsonl     one model on 8, 64 or 256 H100s; rows go to a file
    python benchmarks/recipes.py --table rows.jsonl             the table of ratios

Rows that the file has are not made again, so that a run may be broken off (`--seconds`) and goes on where it was.
Batches grow with the devices: two sequences, or 32 images, for each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshwright
from meshwright.planner.api import plan_draft
from meshwright.planner.sharding.capturing import Traces
from meshwright.specs import load_spec

MESHES = {8: "8", 64: "8x8", 256: "32x8"}
ONE = ("zero2", "fsdp", "ddp", "zero1", "tp-sp", "tp", "cp")
PAIRS = ("fsdp+tp-sp", "zero2+tp-sp", "ddp+tp-sp", "fsdp+tp", "fsdp+cp")
TWO = ("zero2", "fsdp", "hsdp", "ddp+zero2", *PAIRS, "zero1", "ddp")
FREE = "free"


def rows_of(
    spec: str, devices: int, mesh: str, layers: int | None, recipes: list[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """What each recipe, and the free choice, comes to; seconds None where nothing fits or applies."""
    began = time.monotonic()
    per_device = 32 if spec.startswith("vit") else 2
    found = load_spec(spec, batch=per_device * devices, layers=layers)
    model, args, kwargs = found.build()
    traces = Traces(model, args, kwargs or {}, found.loss)
    for recipe in recipes:
        if time.monotonic() - began > seconds:
            return
        start = time.process_time()
        row: dict[str, Any] = {"model": spec, "layers": layers, "devices": devices, "mesh": mesh, "recipe": recipe}
        try:
            prepared, solution = plan_draft(
                model,
                args,
                kwargs,
                loss=found.loss,
                cluster=f"h100-sxm:{max(1, devices // 8)}x8",
                mesh=mesh,
                recipe=None if recipe == FREE else recipe,
                traces=traces,
            )
            plan = prepared.write(solution)
            row |= {
                "step_time_s": plan.predicted.step_time_s,
                "bound_s": plan.solver.bound_s,
                "gap": plan.solver.gap,
                "peak_bytes": plan.predicted.memory.peak_bytes,
                "recompute": plan.options.recompute,
                "like": str(plan.recipe()),
            }
        except meshwright.MeshwrightError as error:
            row |= {"step_time_s": None, "error": f"{type(error).__name__}: {error}"}
        yield row | {"cpu_s": time.process_time() - start}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the step of the chosen plan, and each recipe's as a multiple of it."""
    found = {row["recipe"] for row in rows}
    recipes = [recipe for recipe in dict.fromkeys((*TWO, *ONE, "ep", "fsdp+ep", "zero2+ep")) if recipe in found]
    lines = [f"| model, mesh | chosen | {' | '.join(recipes)} |", f"|---|--:|{'--:|' * len(recipes)}"]
    for key in dict.fromkeys((row["model"], row["mesh"]) for row in rows):
        here = {row["recipe"]: row for row in rows if (row["model"], row["mesh"]) == key}
        free = here[FREE]["step_time_s"]
        cells = " | ".join(_cell(here.get(recipe), free) for recipe in recipes)
        lines.append(f"| {key[0]}, {key[1]} | {'-' if free is None else f'{free:.3f} s'} | {cells} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None, free: float | None) -> str:
    if row is None:
        return ""
    if row["step_time_s"] is None:
        return "no room" if row["error"].startswith("Infeasible") else "does not apply"
    return "-" if free is None else f"{row['step_time_s'] / free:.4f}"


def _known(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?")
    parser.add_argument("devices", nargs="?", type=int, choices=sorted(MESHES), default=8)
    parser.add_argument("--mesh", help="of the devices, by default nodes by devices per node")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--recipe", action="append", default=[], help="only these, or 'free'")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no recipe is begun after so many")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print(table(_known(given.table)))
        return
    mesh = given.mesh or MESHES[given.devices]
    recipes = [FREE, *(TWO if "x" in mesh else ONE)]
    if "mixtral" in given.spec:
        recipes[3:3] = ["fsdp+ep", "zero2+ep"] if "x" in mesh else ["ep"]
    have = {row["recipe"] for row in _known(given.output) if (row["model"], row["mesh"]) == (given.spec, mesh)}
    left = [recipe for recipe in given.recipe or recipes if recipe not in have]
    for row in rows_of(given.spec, given.devices, mesh, given.layers, left, given.seconds) if left else ():
        print(json.dumps(row), flush=True)
        if given.output is not None:
            with given.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""The chosen plan against every recipe, predicted seconds of a step under the same memory limit.

    python benchmarks/recipes.py llama3-8b 64 -o rows.json     one model on 8, 64 or 256 H100s; rows are added to a file
    python benchmarks/recipes.py --table rows.json             the table of ratios

Batches grow with the devices: two sequences, or 32 images, for each.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import meshwright
from meshwright.planner.api import draft, plan_draft
from meshwright.plans import Infeasible
from meshwright.specs import load_spec

MESHES = {8: "8", 64: "8x8", 256: "32x8"}
ONE = ("ddp", "fsdp", "tp", "tp-sp", "cp")
TWO = ("ddp", "fsdp", "hsdp", "ddp+tp-sp", "fsdp+tp", "fsdp+tp-sp", "fsdp+cp")
FREE = "free"


def rows_of(spec: str, devices: int, layers: int | None, only: list[str]) -> list[dict[str, Any]]:
    """What each recipe, and the free choice, comes to; seconds None where nothing fits or applies."""
    per_device = 32 if spec.startswith("vit") else 2
    found = load_spec(spec, batch=per_device * devices, layers=layers)
    model, args, kwargs = found.build()
    recipes = (*(ONE if devices == 8 else TWO), *(("ep",) if devices == 8 else ("fsdp+ep",)) * ("mixtral" in spec))
    rows = []
    for recipe in [FREE, *recipes] if not only else only:
        began = time.process_time()
        row: dict[str, Any] = {"model": spec, "layers": layers, "devices": devices, "recipe": recipe}
        try:
            request = {
                "loss": found.loss,
                "cluster": f"h100-sxm:{max(1, devices // 8)}x8",
                "mesh": MESHES[devices],
                "recipe": None if recipe == FREE else recipe,
            }
            _refuse_what_cannot_fit(model, args, kwargs, request)
            prepared, solution = plan_draft(model, args, kwargs, **request, time_limit_s=60.0)
            plan = prepared.write(solution)
            row |= {
                "step_time_s": plan.predicted.step_time_s,
                "bound_s": plan.solver.bound_s,
                "peak_bytes": plan.predicted.memory.peak_bytes,
                "recompute": plan.options.recompute,
                "like": str(plan.recipe()),
            }
        except meshwright.MeshwrightError as error:
            row |= {"step_time_s": None, "error": f"{type(error).__name__}: {error}"}
        row["cpu_s"] = time.process_time() - began
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _refuse_what_cannot_fit(model: Any, args: tuple, kwargs: dict[str, Any] | None, request: dict[str, Any]) -> None:
    """Infeasible where even the least that each tensor can take is more than the memory at the optimizer's step."""
    prepared = draft(model, args, kwargs, **request, recompute="block")
    timeline = prepared.timeline
    least = sum(
        count * float(np.min(timeline.bytes[item]))
        for item, count in zip(timeline.items, timeline.counts[:, -1], strict=True)
    )
    if least > prepared.limit:
        raise Infeasible(f"the optimizer's step takes at least {least:.3g} bytes of {prepared.limit:.3g}")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the step of the chosen plan, and each recipe's as a multiple of it."""
    recipes = list(dict.fromkeys(row["recipe"] for row in rows if row["recipe"] != FREE))
    lines = [f"| model, devices | chosen | {' | '.join(recipes)} |", f"|---|--:|{'--:|' * len(recipes)}"]
    for key in dict.fromkeys((row["model"], row["devices"]) for row in rows):
        here = {row["recipe"]: row for row in rows if (row["model"], row["devices"]) == key}
        free = here[FREE]["step_time_s"]
        lines.append(
            f"| {key[0]}, {key[1]} | {'-' if free is None else f'{free:.3f} s'} | "
            + " | ".join(_cell(here.get(recipe), free) for recipe in recipes)
            + " |"
        )
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None, free: float | None) -> str:
    if row is None:
        return ""
    if row["step_time_s"] is None:
        return "does not fit" if row["error"].startswith("Infeasible") else "does not apply"
    return "-" if free is None else f"{row['step_time_s'] / free:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?")
    parser.add_argument("devices", nargs="?", type=int, choices=sorted(MESHES), default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--recipe", action="append", default=[], help="only these, or 'free'")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print(table(json.loads(given.table.read_text(encoding="utf-8"))))
        return
    rows = rows_of(given.spec, given.devices, given.layers, given.recipe)
    if given.output is not None:
        known = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else []
        given.output.write_text(json.dumps([*known, *rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

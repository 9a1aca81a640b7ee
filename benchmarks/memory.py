"""Predicted memory against what ranks really allocate (see rank_memory.py): each model of memory_models.py by four
plans, eager and compiled.

    python benchmarks/memory.py [--eager] [--rows FILE] [--plans KIND ...] [NAME ...]   measure, add a line of JSON per
                                                                                        plan to FILE, the plan beside it
    python benchmarks/memory.py --again --rows FILE [NAME ...]        predict anew for the plans that lie there
    python benchmarks/memory.py --table FILE                          print what was measured as a table

The plans: the chosen one, the chosen one under a limit that is near the least (blocks recomputed), FSDP's, and a random
one. Measured is the fuller of the first and the last rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))

from memory_models import MODELS, loss_for
from rank_memory import measure

from meshwright.planner.api import Draft, draft
from meshwright.planner.checking.verify import random_plan
from meshwright.planner.fitting import solve_within
from meshwright.planner.sharding.memory import counted
from meshwright.plans.errors import Infeasible
from meshwright.plans.meshes import Mesh
from meshwright.plans.plan import Plan

PLANS = ("chosen", "tight", "fsdp", "random")
# Shares of what the chosen plan takes that the tight one is given, until one leaves a plan; the last always does.
_SHARES = (0.7, 0.85, 0.95, 1.0)


def drafted(name: str, **options: Any) -> Draft:
    """The model `name`, prepared to be planned."""
    build, mesh = MODELS[name]
    model, args, kwargs = build()
    cluster = f"cpu:{Mesh.parse(mesh).size}"
    return draft(model, args, kwargs, cluster=cluster, mesh=mesh, loss=loss_for(name), whole=True, **options)


def plans_of(name: str, kinds: tuple[str, ...]) -> Iterator[tuple[str, Draft, Plan]]:
    """The plans of the model `name`, each with what it was made of."""
    if {"chosen", "tight"} & set(kinds):
        prepared = drafted(name)
        chosen = prepared.write(solve_within(prepared, time_limit_s=3))
        if "chosen" in kinds:
            yield "chosen", prepared, chosen
    for share in _SHARES if "tight" in kinds else ():
        limit = int(share * chosen.predicted.memory.peak_bytes)
        try:
            prepared = drafted(name, recompute="block", memory_limit_bytes=limit)
            tight = prepared.write(solve_within(prepared, time_limit_s=3))
        except Infeasible:
            continue
        yield "tight", prepared, tight
        break
    if "fsdp" in kinds:
        prepared = drafted(name, recipe="fsdp")
        yield "fsdp", prepared, prepared.write(solve_within(prepared, time_limit_s=3))
    if "random" in kinds:
        prepared = drafted(name, recompute="none")
        yield "random", prepared, random_plan(prepared, list(MODELS).index(name))


def predicted(prepared: Draft, plan: Plan, compiled: bool) -> int:
    """Predicted peak bytes of a plan, run eagerly or compiled."""
    options = msgspec.structs.replace(plan.options, compiled=compiled)
    plan = msgspec.structs.replace(plan, options=options)
    return counted(prepared.captured, plan, prepared.blocks, None).memory.peak_bytes


def rows(name: str, kinds: tuple[str, ...], compiled: bool) -> Iterator[tuple[dict[str, Any], Plan]]:
    """What was predicted and measured of each plan, in bytes, and the plan."""
    for kind, prepared, plan in plans_of(name, kinds):
        began = time.process_time()
        eager = {}
        for rank in {0, plan.mesh.size - 1}:
            eager[rank] = measure("counted", MODELS[name][0]()[0], prepared.captured, plan, rank=rank)
        row: dict[str, Any] = {"model": name, "mesh": str(plan.mesh), "plan": kind}
        row |= {"eager": [predicted(prepared, plan, False), max(eager.values())]}
        if compiled:
            fullest = max(eager, key=eager.__getitem__)
            real = measure("compiled", MODELS[name][0]()[0], prepared.captured, plan, rank=fullest)
            row |= {"compiled": [predicted(prepared, plan, True), real]}
        yield row | {"cpu_s": round(time.process_time() - began)}, plan


def again(path: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file, predicted anew for the plans that lie beside it."""
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        if row["model"] in names:
            plan = Plan.load(_beside(path, row["model"], row["plan"]))
            prepared = drafted(row["model"], recompute=plan.options.recompute)
            for way in {"eager", "compiled"} & set(row):
                row[way][0] = predicted(prepared, plan, way == "compiled")
        found.append(row)
    return found


def _beside(rows: Path, name: str, kind: str) -> Path:
    """Where the plan of a row lies."""
    return rows.with_name(f"{rows.stem}-{name}-{kind}.json")


def table(path: Path) -> str:
    """The ratios predicted / measured of the rows in a file, the last of each plan, and the worst each way."""
    found = {(row["model"], row["plan"]): row for row in map(json.loads, path.read_text().splitlines())}
    lines = [f"| model | mesh | {' | '.join(PLANS)} |", f"|{'---|' * (len(PLANS) + 2)}"]
    seen: dict[str, list[float]] = {}
    for name in dict.fromkeys(model for model, _ in found):
        cells = []
        for plan in PLANS:
            ratios = {}
            for way in ("eager", "compiled"):
                if way in found.get((name, plan), {}):
                    told, real = found[name, plan][way]
                    ratios[way] = told / real
                    seen.setdefault(way, []).append(told / real)
            cells.append(", ".join(f"{r:.3f}" for r in ratios.values()) or "-")
        lines.append(f"| {name} | {MODELS[name][1]} | {' | '.join(cells)} |")
    lines.append("")
    for way, ratios in seen.items():
        inside = sum(0.98 <= r <= 1.15 for r in ratios)
        lines.append(
            f"{way}: least {min(ratios):.3f}, most {max(ratios):.3f}, {inside} of {len(ratios)} in 0.98 to 1.15"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is asked for, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="print this file of rows")
    parser.add_argument("--rows", type=Path, help="the file that rows are added to")
    parser.add_argument("--eager", action="store_true", help="leave out what is compiled, the slow part")
    parser.add_argument("--again", action="store_true", help="predict anew for the plans beside the file of rows")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=PLANS)
    parser.add_argument("names", nargs="*", default=[])
    given = parser.parse_args()
    if given.table is not None:
        print(table(given.table))
        return
    torch.set_num_threads(1)
    if given.again:
        anew = again(given.rows, given.names or list(MODELS))
        given.rows.write_text("".join(json.dumps(row) + "\n" for row in anew))
        return
    for name in given.names or MODELS:
        for row, plan in rows(name, tuple(given.plans), not given.eager):
            print(json.dumps(row), flush=True)
            if given.rows is not None:
                plan.save(_beside(given.rows, name, row["plan"]))
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""Pipelines: the whole grid of profiles, layers, ranks and micro-batches at 1F1B's memory, one line per case.

    python benchmarks/pipeline_grid.py PROFILES.json:NAME[=PATTERN] ... --part 1/18 --seconds 3 >> rows.md
    python benchmarks/pipeline_grid.py --summary rows.md

A part is every so-many-th case, from its number on. p = 16 gets twice the seconds. CPU seconds of this process, imports
not counted; the first case of a process that compiles for the first time has less time.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from pathlib import Path

from meshwright.cost_models.pipeline import simulate
from meshwright.planner.pipeline import Clock, LayerProfile, equal_cuts, load_profile, profile_bound, tune_profile
from meshwright.planner.zoo import chunks_of, named_schedule
from meshwright.plans import RequestError

ZOO = ("gpipe", "1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
LAYERS, RANKS, ROUNDS = (32, 64), (4, 8, 16), (1, 2, 4)
WORST = 20
COLUMNS = ("profile", "layers", "p", "m", "makespan", "bound", "gap %", "zoo", "interleaved", "speed-up", "CPU s")


def published(profile: LayerProfile, ranks: int, microbatches: int, limit: float) -> tuple[float, float]:
    """The best makespan of the published schedules that fit, and of interleaved 1F1B, on equal layers."""
    fitting, interleaved = float("inf"), float("inf")
    for name in ZOO:
        try:
            costs = profile.stage_costs(equal_cuts(profile, ranks * chunks_of(name)))
            parts = (costs.forward, costs.input_gradient, costs.weight_gradient)
            forward, inputs, weights = (sum(part) / costs.stages for part in parts)
            schedule = named_schedule(name, ranks, microbatches, costs=(forward, inputs, weights), delay=profile.delay)
        except RequestError:
            continue
        simulation = simulate(schedule, costs)
        if max(simulation.peak_memory) <= limit:
            fitting = min(fitting, simulation.makespan)
        if name.startswith("interleaved"):
            interleaved = min(interleaved, simulation.makespan)
    return fitting, interleaved


def line(name: str, profile: LayerProfile, ranks: int, microbatches: int, seconds: float) -> str:
    """One case as a row of the table."""
    limit = profile.one_f_one_b_memory(ranks, microbatches)
    found = tune_profile(profile, ranks, microbatches, limits=[limit] * ranks, clock=Clock(limit_s=seconds))
    fitting, interleaved = published(profile, ranks, microbatches, limit)
    reached = found.simulation.makespan
    bound = found.lower_bound
    if found.gap > 0.002:
        # The search gives its bound a small part of its time, which shows where that is short.
        bound = max(bound, profile_bound(profile, ranks, microbatches, limits=[limit] * ranks, seconds=1.5))
    cells = [name, str(sum(profile.layers)), str(ranks), str(microbatches), f"{reached:.6g}", f"{bound:.6g}"]
    cells += [
        f"{100 * (reached / bound - 1):.2f}",
        f"{fitting:.6g}",
        f"{interleaved:.6g}",
        f"{interleaved / reached:.3f}",
    ]
    return "| " + " | ".join([*cells, f"{found.search_cpu_s:.1f}"]) + " |"


def summary(text: str) -> str:
    """Gaps and speed-ups of the rows of a table, by ranks and in all, and the rows furthest from their bound; of rows
    of one case the fastest counts.
    """
    best: dict[tuple[str, ...], list[str]] = {}
    for row in text.splitlines():
        cells = [cell.strip() for cell in row.strip("| \n").split("|")]
        if len(cells) == len(COLUMNS) and cells[1].isdigit():
            key = tuple(cells[:4])
            if key not in best or float(cells[4]) < float(best[key][4]):
                best[key] = cells
    lines = []
    for ranks in (*RANKS, None):
        rows = [row for row in best.values() if ranks is None or row[2] == str(ranks)]
        if not rows:
            continue
        gaps, speeds = [float(row[6]) for row in rows], [float(row[9]) for row in rows if row[9] != "inf"]
        worse = sum(float(row[4]) > float(row[7]) * (1 + 1e-6) for row in rows)
        # What the bound leaves: the mean speed-up of a search that reaches it.
        most = statistics.mean(float(row[8]) / float(row[5]) for row in rows if row[8] != "inf")
        cells = ["all" if ranks is None else f"p {ranks}", str(len(rows)), f"{statistics.median(gaps):.2f}"]
        cells += [
            f"{max(gaps):.2f}",
            f"{sum(gap <= 3 for gap in gaps)}",
            f"{sum(gap > 10 for gap in gaps)}",
            str(worse),
        ]
        cells += [f"{statistics.mean(speeds):.3f}", f"{max(speeds):.3f}", f"{most:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    worst = sorted(best.values(), key=lambda row: -float(row[6]))[:WORST]
    lines += ["", *("| " + " | ".join(row) + " |" for row in worst)]
    return "\n".join(lines)


def main() -> None:
    """Run a part of the grid, or sum one up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="*")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--summary")
    given = parser.parse_args()
    if given.summary:
        print(summary(Path(given.summary).read_text(encoding="utf-8")))
        return
    part, parts = map(int, given.part.split("/"))
    cases = [(text, *sizes) for text in given.profiles for sizes in product(LAYERS, RANKS, ROUNDS)]
    for text, layers, ranks, rounds in cases[part - 1 :: parts]:
        file, _, pattern = text.partition("=")
        profile = load_profile(file, layers=layers, pattern=pattern or None)
        seconds = given.seconds * (2 if ranks == max(RANKS) else 1)
        print(line(file.rpartition(":")[2], profile, ranks, rounds * ranks, seconds), flush=True)


if __name__ == "__main__":
    main()

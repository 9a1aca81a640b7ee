"""Fits the parameters of `cost_models/stacks.toml` to published training rows, and leaves out each source in turn.

    python benchmarks/fit_recipes.py [--write] [--leave-out PATTERN | --halves] [--rounds N]

Every parameter belongs to a library of products, a stack or all stacks; none to a row, a model or a source. With a
source left out its rows are predicted by parameters fitted to the others. What only that source could tell (a stack of
its own) stays at its prior, so the figure is that of a stack never seen.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from meshwright.cost_models import recipe_data, recipes
from meshwright.cost_models.published_recipes import Books, read_recipe, recipe_kind
from meshwright.cost_models.recipes import recipe_step
from meshwright.cost_models.repricing import Priced, statistics
from meshwright.cost_models.stacks import Stack, read_stacks
from meshwright.cost_models.systems import load_systems

ROOT = Path(__file__).resolve().parents[1]
STACKS = ROOT / "cost_models" / "stacks.toml"
ROWS = Path(__file__).resolve().parent / "data" / "published_throughput.csv"
EXPECTED = {"dense": 0.04, "low": 0.06, "experts": 0.12}  # what a row is off by its kind; on the logarithm
OFFSET = 0.03  # what the rows of one source on one device are off together; on the logarithm
ROBUST = 2.0  # from how many times that on a row counts less than by its square
DIFFERENCE = 1e-3


def get(table: Mapping[str, Any], path: Sequence[str]) -> float:
    for key in path:
        table = _child(table, key)
    return float(table)  # type: ignore[arg-type]


def put(table: dict[str, Any], path: Sequence[str], value: float) -> None:
    for key in path[:-1]:
        table = _child(table, key)
    table[path[-1]] = value


def _child(table: Any, key: str) -> Any:
    if isinstance(table, list):
        return next(entry for entry in table if entry["name"] == key)
    return table[key]


def bounds(table: Mapping[str, Any], path: Sequence[str]) -> tuple[float, float]:
    """Between which values a parameter may move; four bits take down to half the time of eight."""
    found = next(table["bounds"][key] for key in reversed(path) if key in table["bounds"])
    return (0.4 * found[0], 0.6 * found[1]) if any("nvfp4" in key for key in path) else (found[0], found[1])


class Rows:
    """The rows, read once and priced under any table of parameters."""

    def __init__(self) -> None:
        rows = list(csv.DictReader(ROWS.read_text(encoding="utf-8").splitlines()))
        systems, books = load_systems(), Books()
        read = [(row, read_recipe(row, systems, books)) for row in rows]
        self.rows = [row for row, reading in read if not isinstance(reading, str)]
        self.readings = [reading for _, reading in read if not isinstance(reading, str)]
        self.sources = [row["source_group"] for row in self.rows]
        self._data: dict[int, np.ndarray] = {}

    def price(self, table: Mapping[str, Any], chosen: Sequence[int], *, held: bool = False) -> list[Priced]:
        """The chosen rows; with `held`, what data parallelism adds stays as it was last priced."""
        stacks = {stack.name: stack for stack in read_stacks(table)}
        return [self._price(i, stacks, held) for i in chosen]

    def _price(self, i: int, stacks: Mapping[str, Stack], held: bool) -> Priced:
        reading = self.readings[i]
        once = recipes.data_s

        def data_s(*arguments: Any) -> np.ndarray:
            if not held:
                self._data[i] = once(*arguments)
            return self._data[i]

        recipes.data_s = data_s
        try:
            price = recipe_step(reading.model, reading.recipe, reading.system, stacks[reading.stack.name])
        finally:
            recipes.data_s = once
        return Priced(
            row=i, source=self.sources[i], model=self.rows[i]["model"], device=reading.system.name,
            kind=recipe_kind(reading), evidence="", published_s=reading.published_s, predicted_s=price.step_s,
            terms=price.terms,
        )  # fmt: skip


def remember(module: Any, name: str) -> None:
    """Kernel and collective prices do not depend on what is fitted: each is computed once in this script."""
    known: dict[Any, Any] = {}
    once = getattr(module, name)

    def price(*arguments: Any, **options: Any) -> Any:
        key = tuple((a.tobytes(), a.shape) if isinstance(a, np.ndarray) else a for a in (*arguments, *options.values()))
        if key not in known:
            known[key] = once(*arguments, **options)
        return known[key]

    setattr(module, name, price)


def fit(rows: Rows, table: dict[str, Any], chosen: Sequence[int], rounds: int) -> dict[str, Any]:
    """The table with its parameters fitted to the `chosen` rows and to their priors.

    Robust least squares on the logarithm of predicted / published, in units of what a row is expected to be off. Rows
    of one source and device share a cluster and its software: an offset of theirs (`OFFSET`) is expected, so that many
    rows of one source say little more of a level than one does. A prior counts by its `spread`.
    """
    table = copy.deepcopy(table)
    told = table["fitted"]["parameters"]
    paths = [parameter["path"] for parameter in told]
    prior, spread = np.log([parameter["prior"] for parameter in told]), np.array([p["spread"] for p in told])
    low, high = np.log([bounds(table, path) for path in paths]).T
    off = np.array([expected(row) for row in rows.price(table, chosen)])
    groups = [(rows.sources[i], rows.rows[i]["gpu"]) for i in chosen]
    members = [np.array([g == group for g in groups]) for group in sorted(set(groups))]

    speaks: dict[int, Sequence[int]] = {}  # positions of the rows that each parameter moves, once known

    def logs(values: np.ndarray, held: bool, at: Sequence[int]) -> np.ndarray:
        for path, value in zip(paths, np.exp(values), strict=True):
            put(table, path, float(value))
        found = rows.price(table, [chosen[one] for one in at], held=held)
        return np.log([row.predicted_s / row.published_s for row in found])

    def scaled(raw: np.ndarray, values: np.ndarray) -> np.ndarray:
        parts = raw / off
        for group in members:
            weight = 1.0 / off[group]
            size = float(np.linalg.norm(weight))
            shared = 1.0 - 1.0 / math.sqrt(1.0 + (OFFSET * size) ** 2)
            parts[group] -= shared * weight / size * (weight / size @ parts[group])
        return np.concatenate([parts, (values - prior) / spread])

    def errors(values: np.ndarray) -> np.ndarray:
        return scaled(logs(values, False, everything), values)

    def slopes(values: np.ndarray) -> np.ndarray:
        base, columns = logs(values, False, everything), []
        for at, path in enumerate(paths):
            moved, raw = values.copy(), base.copy()
            moved[at] += DIFFERENCE if values[at] + DIFFERENCE < high[at] else -DIFFERENCE
            own = speaks.get(at, everything)
            raw[own] = logs(moved, path[-1] != "contention", own)
            speaks[at] = [one for one in own if raw[one] != base[one]]
            columns.append((scaled(raw, moved) - scaled(base, values)) / (moved[at] - values[at]))
            if path[-1] == "contention":
                logs(values, False, own)  # what is held belongs to `values` again
        return np.array(columns).T

    everything = list(range(len(chosen)))
    start = np.clip(prior, low + 1e-3, high - 1e-3)
    options: dict[str, Any] = {"jac": slopes, "bounds": (low, high), "loss": "soft_l1", "f_scale": ROBUST}
    found = least_squares(errors, start, max_nfev=rounds, **options)
    errors(found.x)
    return table


def expected(row: Priced) -> float:
    """How far a row of this kind is expected to be off, beside what its source shares."""
    return EXPECTED["experts" if not row.kind.startswith("dense") else "low" if _low(row) else "dense"]


def report(name: str, found: Sequence[Priced]) -> None:
    for title, keep in KINDS.items():
        part = statistics(row.error for row in found if keep(row))
        if part.mean is not None and part.median is not None and part.p90 is not None and part.bias is not None:
            print(f"{name:28s} {title:12s} {part.rows:4d} rows  mean {part.mean:6.1%}  median {part.median:6.1%}  "
                  f"p90 {part.p90:6.1%}  bias {part.bias:+6.1%}")  # fmt: skip


def _low(row: Priced) -> bool:
    return "fp8" in row.kind or "fp4" in row.kind


KINDS = {
    "dense": lambda row: row.kind.startswith("dense") and not _low(row),
    "moe, fp8": lambda row: not row.kind.startswith("dense") or _low(row),
    "all": lambda row: True,
}


def leave_out(rows: Rows, table: dict[str, Any], pattern: str, rounds: int) -> None:
    """Each source that `pattern` names, predicted by parameters fitted to all others."""
    everything = range(len(rows.rows))
    for source in sorted(set(rows.sources)):
        if re.search(pattern, source):
            own = [i for i in everything if rows.sources[i] == source]
            others = [i for i in everything if rows.sources[i] != source]
            seen, unseen = rows.price(table, own), rows.price(fit(rows, table, others, rounds), own)
            report(f"fit: {source}", seen)
            report(f"out: {source}", unseen)
            ratio = np.mean([abs(row.error) for row in unseen]) / np.mean([abs(row.error) for row in seen])
            print(f"gap: {source} {ratio:.2f}", flush=True)


def halves(rows: Rows, table: dict[str, Any], rounds: int) -> None:
    """Each half of the rows, drawn by chance, predicted by parameters fitted to the other."""
    order = np.random.default_rng(1).permutation(len(rows.rows)).tolist()
    first, second = order[::2], order[1::2]
    seen, unseen = [], []
    for own, others in ((first, second), (second, first)):
        fitted = fit(rows, table, own, rounds)
        seen += rows.price(fitted, own)
        unseen += rows.price(fitted, others)
    report("fitted to half", seen)
    report("other half", unseen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="put the fitted numbers into stacks.toml")
    parser.add_argument("--leave-out", metavar="PATTERN", help="predict each such source by a fit to all others")
    parser.add_argument("--halves", action="store_true", help="predict each half of the rows by a fit to the other")
    parser.add_argument("--rounds", type=int, default=8, help="evaluations of the residuals' slope; 0: no fit")
    options = parser.parse_args()
    for module, name in ((recipes, "gemm_s"), (recipes, "attention_s"), (recipes, "axis_collective_s"),
                         (recipe_data, "axis_collective_s")):  # fmt: skip
        remember(module, name)
    table = tomllib.loads(STACKS.read_text(encoding="utf-8"))
    rows = Rows()
    everything = list(range(len(rows.rows)))
    if options.leave_out is not None:
        leave_out(rows, table, options.leave_out, options.rounds)
        return
    if options.halves:
        halves(rows, table, options.rounds)
        return
    report("before", rows.price(table, everything))
    if options.rounds:
        table = fit(rows, table, everything, options.rounds)
        report("fitted", rows.price(table, everything))
    for source in sorted(set(rows.sources)):
        report(source, rows.price(table, [i for i in everything if rows.sources[i] == source]))
    if options.write:
        write(table, [parameter["path"] for parameter in table["fitted"]["parameters"]])


def write(table: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> None:
    """Put the fitted numbers into the file, in place."""
    text = STACKS.read_text(encoding="utf-8")
    for path in paths:
        text = replaced(text, path, f"{get(table, path):.4g}")
    STACKS.write_text(text, encoding="utf-8")


def replaced(text: str, path: Sequence[str], number: str) -> str:
    section = (
        rf"(\[\[stack\]\]\nname = \"{re.escape(path[1])}\"\n.*?^)" if path[0] == "stack" else rf"(^\[{path[0]}\]\n.*?^)"
    )
    inner = path[2:] if path[0] == "stack" else path[1:]
    key = re.escape(inner[0]) + r" = " + (rf"\{{[^}}\n]*?\b{inner[1]} = " if len(inner) == 2 else "")
    new, count = re.subn(section + "(" + key + r")[0-9.e+-]+", rf"\g<1>\g<2>{number}", text, count=1, flags=re.M | re.S)
    if count != 1:
        raise ValueError(f"'{'.'.join(path)}' must stand in stacks.toml as a number, got none; add it")
    return new


if __name__ == "__main__":
    main()

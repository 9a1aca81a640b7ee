"""Fits the parameters of `cost_models/stacks.toml` to published training rows, and leaves out each source in turn.

    python benchmarks/fit_recipes.py [--write] [--leave-out PATTERN] [--rounds N] [--only BLOCK]

Every parameter belongs to a library of products, a stack or all stacks; none to a row, a model or a source. With a
source left out its rows are predicted by parameters fitted to the others. What only that source could tell (a stack of
its own) stays at its prior, so the figure is that of a stack never seen.
"""

from __future__ import annotations

import argparse
import copy
import csv
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
STIFFNESS = 0.03  # how strongly a parameter is held where rows do not speak; on its logarithm


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
        self.rows = list(csv.DictReader(ROWS.read_text(encoding="utf-8").splitlines()))
        systems, books = load_systems(), Books()
        self.readings = [read_recipe(row, systems, books) for row in self.rows]

    def price(self, table: Mapping[str, Any], chosen: Sequence[int]) -> list[Priced]:
        """The chosen rows that can be priced."""
        stacks = {stack.name: stack for stack in read_stacks(table)}
        return [self._price(i, stacks) for i in chosen if not isinstance(self.readings[i], str)]

    def in_block(self, i: int, block: Mapping[str, Any]) -> bool:
        """Whether row `i` is of the sources and kinds that a block of parameters is fitted to."""
        reading = self.readings[i]
        kind = "" if isinstance(reading, str) else recipe_kind(reading)
        return bool(re.search(block["sources"], self.rows[i]["source_group"]) and re.match(block["kinds"], kind))

    def _price(self, i: int, stacks: Mapping[str, Stack]) -> Priced:
        reading = self.readings[i]
        assert not isinstance(reading, str)
        price = recipe_step(reading.model, reading.recipe, reading.system, stacks[reading.stack.name])
        return Priced(
            row=i, source=self.rows[i]["source_group"], model=self.rows[i]["model"], device=reading.system.name,
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


def fit(
    rows: Rows, table: dict[str, Any], block: Mapping[str, Any], chosen: Sequence[int], rounds: int
) -> dict[str, Any]:
    """The table with a block's parameters fitted to the `chosen` rows, from their priors and held to them a little.

    Robust least squares on the logarithm of predicted / published.
    """
    table = copy.deepcopy(table)
    paths = [parameter["path"] for parameter in block["parameters"]]
    start = np.log([parameter["prior"] for parameter in block["parameters"]])

    def residuals(values: np.ndarray) -> np.ndarray:
        for path, value in zip(paths, np.exp(values), strict=True):
            put(table, path, float(value))
        errors = np.log([row.predicted_s / row.published_s for row in rows.price(table, chosen)])
        return np.concatenate([errors, STIFFNESS * (values - start)])

    low, high = np.log([bounds(table, path) for path in paths]).T
    found = least_squares(
        residuals,
        np.clip(start, low + 1e-3, high - 1e-3),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
        max_nfev=rounds,
    )
    residuals(found.x)
    return table


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


def fit_all(rows: Rows, table: dict[str, Any], chosen: Sequence[int], rounds: int, only: str) -> dict[str, Any]:
    """Every block of parameters fitted in turn to those of the `chosen` rows that its sources name."""
    for block in table["fitted"]:
        part = [i for i in chosen if rows.in_block(i, block)]
        if part and re.search(only, block["name"]):
            table = fit(rows, table, block, part, rounds)
    return table


def priors(table: dict[str, Any]) -> dict[str, Any]:
    """The table as it was thought to be before any row was seen."""
    table = copy.deepcopy(table)
    for block in table["fitted"]:
        for parameter in block["parameters"]:
            put(table, parameter["path"], parameter["prior"])
    return table


def leave_out(rows: Rows, table: dict[str, Any], pattern: str, rounds: int) -> None:
    """Each source that `pattern` names, predicted by parameters fitted to all others."""
    everything = range(len(rows.rows))
    fitted, unseen = [], []
    for source in sorted({row["source_group"] for row in rows.rows}):
        if re.search(pattern, source):
            others = [i for i in everything if rows.rows[i]["source_group"] != source]
            own = [i for i in everything if rows.rows[i]["source_group"] == source]
            fitted += rows.price(table, own)
            unseen += rows.price(fit_all(rows, priors(table), others, rounds, ""), own)
            report(f"fit: {source}", fitted[-len(own) :])
            report(f"out: {source}", unseen[-len(own) :])
    report("fit: all of these", fitted)
    report("out: all of these", unseen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="put the fitted numbers into stacks.toml")
    parser.add_argument("--leave-out", metavar="PATTERN", help="predict each such source by a fit to all others")
    parser.add_argument("--rounds", type=int, default=8, help="evaluations of the residuals' slope; 0: no fit")
    parser.add_argument("--only", default="", help="blocks of parameters to fit, by name")
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
    report("before", rows.price(table, everything))
    if options.rounds:
        table = fit_all(rows, table, everything, options.rounds, options.only)
        report("fitted", rows.price(table, everything))
    for source in sorted({row["source_group"] for row in rows.rows}):
        report(source, rows.price(table, [i for i in everything if rows.rows[i]["source_group"] == source]))
    if options.write:
        write(table, [parameter["path"] for block in table["fitted"] for parameter in block["parameters"]])


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

"""Published tables priced again: which table it is, row by row, and how far the prices are off.

Tables are told apart by their columns. A row is priced or refused with what it does not say; nothing is guessed.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from ..plans.errors import RequestError
from . import published_collectives, published_kernels, published_recipes
from .repricing import Priced, Refused, Statistics, grouped, kendall_tau, statistics
from .systems import load_systems

__all__ = ["Report", "Tau", "read_table", "reprice", "validate"]

_NOISE = 0.02  # published throughputs of equal runs differ by about so much
_LEAST_GROUP = 5  # rows from which on a rank correlation says something


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau:
    """Rank correlation inside one group of comparable rows: over all pairs, and over those more than 2 % apart."""

    group: str
    rows: int
    tau: float
    tau_apart: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `validate` found: all rows, priced and refused, and statistics over the priced ones."""

    table: str
    rows: int
    priced: tuple[Priced, ...]
    refused: tuple[Refused, ...]

    @property
    def errors(self) -> Statistics:
        """Over all priced rows."""
        return statistics(row.error for row in self.priced)

    @property
    def memory_errors(self) -> Statistics:
        """Over the rows that say a memory."""
        return statistics(
            row.predicted_bytes / row.published_bytes - 1.0
            for row in self.priced
            if row.predicted_bytes is not None and row.published_bytes is not None
        )

    @property
    def taus(self) -> tuple[Tau, ...]:
        """Kendall's tau inside each group of at least five comparable rows that are not all alike."""
        named = sorted((row for row in self.priced if row.group is not None), key=lambda row: str(row.group))
        found: list[Tau] = []
        for name, part in itertools.groupby(named, key=lambda row: str(row.group)):
            rows = list(part)
            published, predicted = (
                [getattr(row, key) / row.work for row in rows] for key in ("published_s", "predicted_s")
            )
            tau = kendall_tau(published, predicted)
            if len(rows) >= _LEAST_GROUP and tau is not None:
                found.append(
                    Tau(group=name, rows=len(rows), tau=tau, tau_apart=kendall_tau(published, predicted, _NOISE))
                )
        return tuple(found)

    @property
    def kendall_tau(self) -> float | None:
        """The mean over the groups; None without a group."""
        taus = [tau.tau for tau in self.taus]
        return float(np.mean(taus)) if taus else None

    def by(self, key: str) -> dict[str, Statistics]:
        """Statistics under each 'source', 'model', 'device', 'kind' or 'evidence'."""
        return grouped(self.priced, lambda row: str(getattr(row, key)))


def validate(path: str | Path) -> Report:
    """The rows of the CSV file `path` priced; RequestError when it is no table of a known kind."""
    return reprice(read_table(path), where=str(path))


def reprice(rows: Sequence[Mapping[str, str]], *, where: str = "the table") -> Report:
    """The rows of one table priced; RequestError names `where` and the columns that no known table has."""
    columns = set(rows[0]) if rows else set()
    for name, needed, price in _TABLES:
        if needed <= columns:
            found = price(rows)
            return Report(
                table=name,
                rows=len(rows),
                priced=tuple(row for row in found if isinstance(row, Priced)),
                refused=tuple(row for row in found if isinstance(row, Refused)),
            )
    known = "; ".join(f"{name}: {', '.join(sorted(needed))}" for name, needed, _ in _TABLES)
    raise RequestError(
        f"'table' must have the columns of a known kind ({known}), got {', '.join(sorted(columns)) or 'no rows'}; in "
        f"{where}; rename the columns"
    )


def _recipes(rows: Sequence[Mapping[str, str]]) -> list[Priced | Refused]:
    systems, books = load_systems(), published_recipes.Books()
    return [published_recipes.price_recipe(number, row, systems, books) for number, row in enumerate(rows, 1)]


def _collectives(rows: Sequence[Mapping[str, str]]) -> list[Priced | Refused]:
    systems = load_systems()
    return [published_collectives.price_collective(number, row, systems) for number, row in enumerate(rows, 1)]


def _kernels(rows: Sequence[Mapping[str, str]]) -> list[Priced | Refused]:
    systems = load_systems()
    return [published_kernels.price_kernel(number, row, systems) for number, row in enumerate(rows, 1)]


_TABLES = (
    ("recipes", published_recipes.COLUMNS, _recipes),
    ("collectives", published_collectives.COLUMNS, _collectives),
    ("kernels", published_kernels.COLUMNS, _kernels),
)


def read_table(path: str | Path) -> list[dict[str, str]]:
    """Rows of a table with a header, cells divided by commas, semicolons or tabs; blanks for missing cells. Columns are
    found by their names in any case, and by some that others give them. RequestError when the file cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        first = text.partition("\n")[0]
        divider = max(",;\t", key=first.count)
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=divider) if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise RequestError(f"'FILE' must be a readable CSV file, got {error}; check the path") from None
    known = _columns()
    names = [known.get(re.sub(r"\W+", "_", name.lower()).strip("_"), name.strip()) for name in rows[0]] if rows else []
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError(f"'columns' must differ, got {', '.join(twice)} twice; in {path}; rename one")
    return [dict(itertools.zip_longest(names, (cell.strip() for cell in row[: len(names)]), fillvalue="")) for row in
            rows[1:]]  # fmt: skip


def _columns() -> dict[str, str]:
    """The published tables' name of every column name that is understood, in small letters."""
    folder = resources.files(__package__ or "meshwright.cost_models")
    table = tomllib.loads((folder / "columns.toml").read_text(encoding="utf-8"))
    return {other.lower(): name for name, others in table["columns"].items() for other in (name, *others)}

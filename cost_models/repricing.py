"""What a price said of a published row, and statistics over such rows.

A priced row holds seconds (or bytes) as published and as predicted; an error is predicted / published - 1.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Priced", "Refused", "Statistics", "grouped", "kendall_tau", "positive", "source_name", "stated",
           "statistics", "whole"]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One row of a table: what was published and what the models say of it, in seconds and bytes.

    `group` holds what rows must share to be compared by rank, by seconds per `work` (tokens per device, FLOP, ...);
    `terms` are named parts of the predicted seconds.
    """

    row: int
    source: str
    model: str
    device: str
    kind: str
    evidence: str
    published_s: float
    predicted_s: float
    group: Hashable = None
    work: float = 1.0
    published_bytes: float | None = None
    predicted_bytes: float | None = None
    terms: tuple[tuple[str, float], ...] = field(default=())

    @property
    def error(self) -> float:
        """Relative error of the predicted seconds."""
        return self.predicted_s / self.published_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A row that was not priced, and what it does not say or asks too much of."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Absolute relative errors over some rows; None where there are none."""

    rows: int
    mean: float | None
    median: float | None
    p90: float | None
    bias: float | None


def statistics(errors: Iterable[float]) -> Statistics:
    """Mean, median and 90th percentile of the absolute errors, and the mean with its sign."""
    signed = np.asarray(list(errors), np.float64)
    if not len(signed):
        return Statistics(rows=0, mean=None, median=None, p90=None, bias=None)
    size = np.abs(signed)
    return Statistics(
        rows=len(signed),
        mean=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.percentile(size, 90)),
        bias=float(signed.mean()),
    )


def grouped(rows: Sequence[Priced], key: Callable[[Priced], str]) -> dict[str, Statistics]:
    """Statistics of the rows under each value of `key`, sorted by it."""
    ordered = sorted(rows, key=key)
    return {name: statistics(row.error for row in part) for name, part in itertools.groupby(ordered, key=key)}


def kendall_tau(published: Sequence[float], predicted: Sequence[float], apart: float = 0.0) -> float | None:
    """Rank correlation tau-b in -1 to 1: pairs in the same order less pairs in the other; None where all are equal.

    With `apart`, only pairs whose published values differ by more than that share are counted, the rest being noise.
    """
    first, second = (np.log(np.divide.outer(values, values)) for values in (published, predicted))
    counted = np.abs(first) > math.log1p(apart)
    first, second = np.sign(first) * counted, np.sign(second) * counted
    scale = float(np.sqrt(np.abs(first).sum() * np.abs(second).sum()))
    return float((first * second).sum()) / scale if scale > 0 else None


def positive(text: str | None) -> float | None:
    """The number above 0 that a cell holds, else None; commas group digits."""
    plain = (text or "").strip()
    try:
        value = float(plain.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", plain) else plain)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def whole(text: str | None) -> int | None:
    """The whole number above 0 that a cell holds, else None."""
    value = positive(text)
    return int(value) if value is not None and value == int(value) else None


def stated(row: Mapping[str, str], name: str) -> str:
    """The text of a cell; nothing where it only says that it says nothing."""
    text = row.get(name, "").strip()
    return "" if text.lower() in ("-", "--", "n/a", "na", "none", "nan", "?", "unknown", "not stated") else text


def source_name(row: Mapping[str, str]) -> str:
    """What a row's source has in common with its neighbours': the group, else the place without line and commit."""
    group = row.get("source_group", "")
    return (
        group or re.sub(r":\d[\d,-]*|\s*@\w{7,40}|intra_\d+\.json", "", row.get("source", "")).strip() or "not stated"
    )

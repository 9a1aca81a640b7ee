"""How far predicted times may be off: relative uncertainties by family of kernels, and the interval of a step."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources

__all__ = ["FAMILIES", "datasheet_uncertainties", "interval_s"]

FAMILIES = ("product", "attention", "memory", "collective", "update", "host")


def datasheet_uncertainties() -> dict[str, float]:
    """Of prices that come from data sheets, by family; see `uncertainty.toml`."""
    folder = resources.files(__package__ or "meshwright.cost_models")
    table = tomllib.loads((folder / "uncertainty.toml").read_text(encoding="utf-8"))["datasheet"]
    return {family: float(table[family]) for family in FAMILIES}


def interval_s(seconds: Mapping[str, float], uncertainties: Mapping[str, float]) -> tuple[float, float]:
    """The interval around a sum of `seconds` by family when all of its families are off to the same side, each by its
    uncertainty u: the times divided and multiplied by 1 + u."""
    low = sum(time / (1.0 + uncertainties[family]) for family, time in seconds.items())
    high = sum(time * (1.0 + uncertainties[family]) for family, time in seconds.items())
    return low, high

"""Finding names by their dotted text."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["resolve"]


def resolve(name: str) -> Any:
    """The object with the dotted `name`: the longest importable module, then attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)

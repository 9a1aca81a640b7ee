"""Whether this machine has what Meshwright needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Finding", "examine"]

_OLDEST_TORCH = (2, 13)
_NEWEST_TORCH = (2, 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at: what was found, what should hold, and whether it does."""

    name: str
    ok: bool
    found: str
    rule: str


def examine() -> list[Finding]:
    """All findings; none raises."""
    return [
        _python(),
        _torch(),
        _solver("highs", "highspy"),
        _solver("pulp", "pulp"),
        _cores(),
        _memory(),
        _gloo(),
        _folder(),
    ]


def _finding(name: str, rule: str, look: Callable[[], tuple[bool, str]]) -> Finding:
    try:
        ok, found = look()
    except Exception as error:  # a broken installation may raise anything, and that is the finding
        ok, found = False, f"{type(error).__name__}: {str(error)[:200]}"
    return Finding(name=name, ok=ok, found=found, rule=rule)


def _python() -> Finding:
    return _finding("python", "3.11 or later", lambda: (sys.version_info >= (3, 11), sys.version.split()[0]))


def _torch() -> Finding:
    def look() -> tuple[bool, str]:
        version = importlib.metadata.version("torch")
        major, minor = (int(part) for part in version.split(".")[:2])
        return _OLDEST_TORCH <= (major, minor) <= _NEWEST_TORCH, version

    oldest, newest = (".".join(str(part) for part in pair) for pair in (_OLDEST_TORCH, _NEWEST_TORCH))
    return _finding("torch", f"{oldest}.x to {newest}.x, the tested range", look)


def _solver(name: str, package: str) -> Finding:
    def look() -> tuple[bool, str]:
        importlib.import_module(package)
        return True, importlib.metadata.version(package)

    return _finding(f"solver {name}", f"'{package}' can be imported", look)


def _cores() -> Finding:
    def look() -> tuple[bool, str]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cores >= 1, str(cores)

    return _finding("cores", "1 or more", look)


def _memory() -> Finding:
    def look() -> tuple[bool, str]:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total >= 4 << 30, f"{total / 2**30:.1f} GiB"

    return _finding("memory", "4 GiB or more", look)


def _gloo() -> Finding:
    def look() -> tuple[bool, str]:
        distributed = importlib.import_module("torch.distributed")
        ok = bool(distributed.is_available() and distributed.is_gloo_available())
        return ok, "available" if ok else "missing"

    return _finding("gloo", "available, for `check --ranks gloo`", look)


def _folder() -> Finding:
    def look() -> tuple[bool, str]:
        with tempfile.TemporaryFile(dir="."):
            return True, os.getcwd()

    return _finding("working folder", "can be written", look)

"""The version of Meshwright; the packaging reads it here."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"

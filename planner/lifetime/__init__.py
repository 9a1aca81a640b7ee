"""Weeks of cluster life: failures and slow-downs by published rates, and what each policy makes of them."""

from __future__ import annotations

from .jobs import load_job, transformer_job
from .life import POLICY_NAMES, Life, compared, live
from .rates import Costs, Event, Rates, events_of

__all__ = [
    "POLICY_NAMES",
    "Costs",
    "Event",
    "Life",
    "Rates",
    "compared",
    "events_of",
    "live",
    "load_job",
    "transformer_job",
]

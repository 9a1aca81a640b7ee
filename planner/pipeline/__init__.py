"""Partition, placement and schedule of a pipeline, chosen together; it needs no torch and no program."""

from __future__ import annotations

from .bounds import fixed_stages_bound
from .exact import exact_time
from .fixed import tune_orders
from .joint import tune_profile
from .orders import Clock
from .profile_bounds import profile_bound
from .profiles import LayerProfile, StageRow, equal_cuts, load_profile, load_stage_row
from .requests import simulate_plan, simulate_profile, simulate_stages
from .result import Tuned

__all__ = [
    "Clock",
    "LayerProfile",
    "StageRow",
    "Tuned",
    "equal_cuts",
    "exact_time",
    "fixed_stages_bound",
    "load_profile",
    "load_stage_row",
    "profile_bound",
    "simulate_plan",
    "simulate_profile",
    "simulate_stages",
    "tune_orders",
    "tune_profile",
]

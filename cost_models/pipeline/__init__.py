"""The pipeline simulator: what a schedule of stages costs in time and memory.

`simulate` says everything about one schedule; `incremental.Incremental` only the makespan, compiled, move by move.
"""

from __future__ import annotations

from .costs import StageCosts
from .critical_path import CriticalPath
from .planned import planned_costs
from .simulate import Bubble, Simulation, simulate

__all__ = ["Bubble", "CriticalPath", "Simulation", "StageCosts", "planned_costs", "simulate"]

"""The pipeline simulator: what a schedule of stages costs in time and memory."""

from __future__ import annotations

from .costs import StageCosts
from .simulate import Bubble, Simulation, simulate

__all__ = ["Bubble", "Simulation", "StageCosts", "simulate"]

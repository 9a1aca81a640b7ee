"""Watching a job: what a step should take, whether it takes longer, and which rank or link is to blame."""

from __future__ import annotations

from .heartbeats import Heartbeats
from .predictor import StagePredictor, workload, workload_prior
from .synthetic import DISTRIBUTIONS, JobRun, packed
from .watch import Detector

__all__ = [
    "DISTRIBUTIONS",
    "Detector",
    "Heartbeats",
    "JobRun",
    "StagePredictor",
    "packed",
    "workload",
    "workload_prior",
]

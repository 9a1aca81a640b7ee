"""Planning again when devices die or slow down: a job's arrangements, their prices, baselines, and the search."""

from __future__ import annotations

from .from_plan import job_of_plan
from .job import Job
from .moves import StateMove, state_move
from .policies import POLICIES, healthy_arrangement, repartitioned
from .replan import Replanned, lower_bound_s, replan_job
from .schedules import schedule_of, stage_costs, tuned_schedule
from .workbench import Workbench

__all__ = [
    "POLICIES",
    "Job",
    "Replanned",
    "StateMove",
    "Workbench",
    "healthy_arrangement",
    "job_of_plan",
    "lower_bound_s",
    "repartitioned",
    "replan_job",
    "schedule_of",
    "stage_costs",
    "state_move",
    "tuned_schedule",
]

"""What a plan is: pure values, no torch."""

from __future__ import annotations

from .actions import Action, TimedAction, parse_action
from .adapted import Adapted
from .arrangements import Arrangement, Replica
from .clusters import Cluster, Level, Link
from .conflict import Conflict
from .diff import Change, Diff, Figure
from .errors import (
    CaptureError,
    CheckError,
    Infeasible,
    MeshwrightError,
    PlanError,
    ReplayError,
    RequestError,
    StateLost,
    StepError,
    UnsupportedOpError,
)
from .explanation import Alternative, Explanation, Limit
from .facts import Fact, facts_of
from .health import Alarm, Health, Report
from .layouts import (
    PARTIAL,
    REPLICATE,
    Layout,
    Placement,
    chunk_sizes,
    is_partial,
    local_range,
    local_shape,
    parse_layout,
    parse_placement,
    shard,
    shard_dim,
)
from .likeness import Departure, Likeness
from .meshes import Mesh
from .migration import Carried, Migration, Missing, Move, Place, carried, migrate
from .pipelines import Pipeline, Stage, StageCost
from .plan import (
    Block,
    Crossing,
    Edge,
    Memory,
    Model,
    Node,
    Options,
    Origin,
    Plan,
    Predicted,
    Sharding,
    Solver,
    StageMeshes,
    Tensor,
    plan_schema,
)
from .progress import progress
from .recipes import RECIPES, Recipe
from .replacements import Replacement
from .schedule_pictures import schedule_svg, schedule_text, schedule_trace
from .schedules import Schedule
from .steps import Step, parse_step
from .version import VERSION

__all__ = [
    "Adapted",
    "Alarm",
    "Arrangement",
    "Alternative",
    "Action",
    "Block",
    "CaptureError",
    "Carried",
    "Change",
    "CheckError",
    "Cluster",
    "Conflict",
    "Crossing",
    "Departure",
    "Diff",
    "Edge",
    "Explanation",
    "Fact",
    "Figure",
    "Health",
    "Infeasible",
    "Layout",
    "Limit",
    "Likeness",
    "Level",
    "Link",
    "Memory",
    "MeshwrightError",
    "Mesh",
    "Migration",
    "Missing",
    "Model",
    "Move",
    "Node",
    "Options",
    "Origin",
    "PARTIAL",
    "Place",
    "Placement",
    "Plan",
    "Pipeline",
    "PlanError",
    "Predicted",
    "RECIPES",
    "REPLICATE",
    "Recipe",
    "ReplayError",
    "Replacement",
    "Replica",
    "Report",
    "RequestError",
    "Schedule",
    "Sharding",
    "Solver",
    "Stage",
    "StageCost",
    "StageMeshes",
    "StateLost",
    "Step",
    "StepError",
    "Tensor",
    "TimedAction",
    "UnsupportedOpError",
    "VERSION",
    "carried",
    "chunk_sizes",
    "facts_of",
    "is_partial",
    "local_range",
    "local_shape",
    "migrate",
    "parse_action",
    "parse_layout",
    "parse_placement",
    "parse_step",
    "plan_schema",
    "progress",
    "schedule_svg",
    "schedule_text",
    "schedule_trace",
    "shard",
    "shard_dim",
]

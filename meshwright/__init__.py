"""Meshwright plans how a PyTorch model is split over a cluster, says what the plan costs, and runs it.

The names load their rooms when they are first used, so that `import meshwright` takes no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .planner.adapt import adapt
    from .planner.api import plan
    from .planner.apply import apply, autoparallelize
    from .planner.checking.verify import check
    from .planner.explaining.conflicts import explain_infeasible
    from .planner.explaining.explain import explain
    from .planner.sharding.constraints import Constraint
    from .planner.sharding.own_rules import OpRule
    from .planner.sharding.regions import any_of
    from .planner.training.elastic import Elastic, elastic
    from .planner.workloads import workload_of
    from .plans import VERSION as __version__
    from .plans import (
        Adapted,
        CaptureError,
        CheckError,
        Cluster,
        Conflict,
        Diff,
        Explanation,
        Health,
        Infeasible,
        Likeness,
        Link,
        Mesh,
        MeshwrightError,
        Plan,
        PlanError,
        Replacement,
        ReplayError,
        RequestError,
        StateLost,
        StepError,
        UnsupportedOpError,
        plan_schema,
    )
    from .requests import replan

__all__ = [
    "Adapted",
    "CaptureError",
    "CheckError",
    "Cluster",
    "Conflict",
    "Constraint",
    "Diff",
    "Elastic",
    "Explanation",
    "Infeasible",
    "Likeness",
    "Link",
    "Mesh",
    "MeshwrightError",
    "OpRule",
    "Plan",
    "PlanError",
    "Health",
    "Replacement",
    "ReplayError",
    "RequestError",
    "StateLost",
    "StepError",
    "UnsupportedOpError",
    "__version__",
    "adapt",
    "any_of",
    "apply",
    "autoparallelize",
    "check",
    "elastic",
    "explain",
    "explain_infeasible",
    "plan",
    "plan_schema",
    "replan",
    "workload_of",
]

_FROM_PLANNER = {
    "Constraint": "sharding.constraints",
    "Elastic": "training.elastic",
    "OpRule": "sharding.own_rules",
    "adapt": "adapt",
    "any_of": "sharding.regions",
    "apply": "apply",
    "autoparallelize": "apply",
    "check": "checking.verify",
    "elastic": "training.elastic",
    "explain": "explaining.explain",
    "explain_infeasible": "explaining.conflicts",
    "plan": "api",
    "workload_of": "workloads",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module = f".planner.{_FROM_PLANNER[name]}" if name in _FROM_PLANNER else ".plans"
    module = ".requests" if name == "replan" else module
    room = importlib.import_module(module, __name__)
    value = getattr(room, "VERSION" if name == "__version__" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

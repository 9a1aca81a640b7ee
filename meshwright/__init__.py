"""Meshwright plans how a PyTorch model is split over a cluster, says what the plan costs, and runs it.

The names load their rooms when they are first used, so that `import meshwright` takes no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .planner.api import apply, autoparallelize, check, plan
    from .plans import VERSION as __version__
    from .plans import (
        CaptureError,
        CheckError,
        Cluster,
        Diff,
        Infeasible,
        Link,
        Mesh,
        MeshwrightError,
        Plan,
        PlanError,
        ReplayError,
        RequestError,
        UnsupportedOpError,
        plan_schema,
    )

__all__ = [
    "CaptureError",
    "CheckError",
    "Cluster",
    "Diff",
    "Infeasible",
    "Link",
    "Mesh",
    "MeshwrightError",
    "Plan",
    "PlanError",
    "ReplayError",
    "RequestError",
    "UnsupportedOpError",
    "__version__",
    "apply",
    "autoparallelize",
    "check",
    "plan",
    "plan_schema",
]

_FROM_PLANNER = ("apply", "autoparallelize", "check", "plan")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    room = importlib.import_module(".planner.api" if name in _FROM_PLANNER else ".plans", __name__)
    value = getattr(room, "VERSION" if name == "__version__" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

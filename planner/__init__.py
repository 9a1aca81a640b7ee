"""What to do: strategies, prices of a whole program, the exact search, plans, and running and checking them.

The names load their modules when they are first used, so that `planner.pipeline` and `planner.zoo` take no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Draft, draft, plan, plan_draft
    from .apply import autoparallelize
    from .fitting import solve_within
    from .sharding.constraints import Constraint
    from .solver.problem import Overlap, Problem, Row, Solution, evaluate
    from .solver.sampling import sample
    from .solver.search import solve

__all__ = [
    "Constraint",
    "Draft",
    "Overlap",
    "Problem",
    "Row",
    "Solution",
    "autoparallelize",
    "draft",
    "evaluate",
    "plan",
    "plan_draft",
    "sample",
    "solve",
    "solve_within",
]

_MODULES = {
    "api": ("Draft", "draft", "plan", "plan_draft"),
    "apply": ("autoparallelize",),
    "sharding.constraints": ("Constraint",),
    "fitting": ("solve_within",),
    "solver.problem": ("Overlap", "Problem", "Row", "Solution", "evaluate"),
    "solver.sampling": ("sample",),
    "solver.search": ("solve",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value

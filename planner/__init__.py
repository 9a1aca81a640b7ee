"""What to do: strategies, prices of a whole program, the exact search, plans, and running and checking them."""

from __future__ import annotations

from .api import Draft, draft, plan, plan_draft, solve_within
from .apply import autoparallelize
from .constraints import Constraint
from .problem import Overlap, Problem, Row, Solution, evaluate
from .sampling import sample
from .solver import solve

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

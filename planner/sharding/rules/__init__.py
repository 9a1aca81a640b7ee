"""Sharding rules along one mesh axis: which layouts of its inputs give which layouts of its outputs, op by op."""

from __future__ import annotations

from .linear import LINEAR_RULES
from .math import MATH_RULES
from .rule import Link, Rule, RuleFunction, from_links, replicated
from .spatial import SPATIAL_RULES
from .views import VIEW_RULES, aligned_dims

__all__ = [
    "LINEAR_RULES",
    "MATH_RULES",
    "SPATIAL_RULES",
    "VIEW_RULES",
    "Link",
    "Rule",
    "RuleFunction",
    "aligned_dims",
    "from_links",
    "replicated",
]

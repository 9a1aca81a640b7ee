"""Which sizes of inputs a plan takes: those it was made for and, along its dynamic dims, those of their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .errors import ReplayError

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["check_sizes"]


def check_sizes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ReplayError when inputs of `shapes` (elements, by name) are not for `plan`.

    A plan without dynamic dims is not refused here: other sizes are tried.
    """
    if not plan.options.dynamic:
        return
    ranges = {(d.input, d.dim): d for d in plan.options.dynamic}
    for tensor in plan.inputs:
        shape = shapes.get(tensor.name, tensor.shape)
        for dim, (planned, size) in enumerate(zip(tensor.shape, shape, strict=False)):
            declared = ranges.get((tensor.name, dim))
            where = f"dim {dim} of {tensor.name}"
            if declared is None:
                if size != planned:
                    raise ReplayError(
                        f"'inputs' must keep the planned size {planned} of {where}, got {size}; declare that dim as "
                        "dynamic and plan again"
                    )
                continue
            if not declared.takes(size):
                raise ReplayError(
                    f"'inputs' must stay in the planned range of {where}, {declared.span}, got {size}; widen the range "
                    "and plan again"
                )

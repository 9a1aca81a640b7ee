"""How a program is read and run: capture, canonical form, local programs, the parallel module, simulated ranks."""

from __future__ import annotations

from .capture import capture
from .graph import Captured, Source, tensor_args, value_of, values_of
from .local import LocalProgram, Lookup, localize
from .lookup import PlanLookup
from .naming import op_name
from .simulate import assemble, piece, run_ranks
from .split import Halves, split
from .trees import Tree, flatten, flatten_call

__all__ = [
    "Captured",
    "Halves",
    "LocalProgram",
    "Lookup",
    "PlanLookup",
    "Source",
    "Tree",
    "assemble",
    "capture",
    "flatten",
    "flatten_call",
    "localize",
    "op_name",
    "piece",
    "run_ranks",
    "split",
    "tensor_args",
    "value_of",
    "values_of",
]

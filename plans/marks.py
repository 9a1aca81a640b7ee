"""Words by which entries of a plan are known that stand for how the step is run, not for ops of the model."""

from __future__ import annotations

__all__ = ["KEEP", "KEPT", "LATE"]

# What the name of the entry ends in that says how a parameter lies from the forward to the backward.
KEEP = "::keep"
# Its rule where the parameter is gathered once for both.
KEPT = "kept"
# The rule of a gradient that is reduced when the backward is done.
LATE = "late"

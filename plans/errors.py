"""Every error that Meshwright raises for its user, in one place.

    MeshwrightError
    +-- RequestError (ValueError)        the request is wrong                              exit code 2
    |   +-- CaptureError                 the model cannot be captured as asked
    |   |   +-- UnsupportedOpError       an op communicates by itself
    |   +-- PlanError                    a plan file is damaged, hostile or of another version
    |   +-- CalibrationError             a calibration file is damaged or of another version
    |   +-- ReplayError                  a sound plan, but for another model, mesh or torch version
    +-- Infeasible                       no plan satisfies the limits                      exit code 3
    +-- StateLost                        no survivor and no checkpoint holds what a new plan needs
    +-- CheckError                       a sharded program does not compute what the model computes
    +-- StepError                        a rank of a pipeline failed in the middle of a training step

Messages have the form: 'what' must RULE, got VALUE; where it came from; the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conflict import Conflict

__all__ = [
    "CalibrationError",
    "CaptureError",
    "CheckError",
    "Infeasible",
    "MeshwrightError",
    "PlanError",
    "ReplayError",
    "RequestError",
    "StateLost",
    "StepError",
    "UnsupportedOpError",
]


class MeshwrightError(Exception):
    """Root of every error meant for the user."""

    exit_code = 1


class RequestError(MeshwrightError, ValueError):
    """The request is wrong: the message names the input, the rule, the value and the way out."""

    exit_code = 2


class CaptureError(RequestError):
    """The model cannot be captured without changing what it computes."""


class UnsupportedOpError(CaptureError):
    """An op communicates by itself, so no rule can say how it runs on pieces."""


class PlanError(RequestError):
    """A plan file is damaged, hostile or of another version."""


class CalibrationError(RequestError):
    """A calibration file is damaged, of another version, or not for this device."""


class ReplayError(RequestError):
    """A sound plan, but for another model, cluster, mesh or torch version."""


class Infeasible(MeshwrightError):
    """No plan satisfies the limits: the message says which limit binds and by how much. The command line adds the
    `conflict`: the smallest set of limits that cannot be met together, and the nearest change that fits."""

    exit_code = 3
    conflict: Conflict | None = None


class StateLost(MeshwrightError):
    """Training cannot go on: no survivor and no checkpoint holds what the new plan needs."""


class CheckError(MeshwrightError):
    """A sharded program does not compute what the model computes."""


class StepError(MeshwrightError):
    """A rank of a pipeline failed in the middle of a training step: the message names the rank and the action."""

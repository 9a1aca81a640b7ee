"""What the arguments of the public calls must be, by name: each is looked at before anything is done with it.

Only the kind of a value is judged here. What a text must say is judged where it is read (meshes, clusters, recipes,
constraints), what an input must be by capture."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..cost_models.calibration import Calibration
from ..passes.graph import Captured
from ..passes.naming import op_name
from ..plans.clusters import Cluster
from ..plans.errors import RequestError
from ..plans.health import Health
from ..plans.meshes import Mesh
from ..plans.plan import Plan
from .sharding.constraints import Constraint
from .sharding.own_rules import OpRule

__all__ = ["check_arguments", "check_replicated"]

_SHOWN = 80
_NAMED = 12


@dataclass(frozen=True, slots=True)
class _Kind:
    """Which values an argument may have: the test, the rule in words, and the way out."""

    fits: Callable[[Any], bool]
    rule: str
    out: str


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _sequence(*kinds: type) -> Callable[[Any], bool]:
    """A sequence of these; a text is no sequence of texts."""
    return lambda value: (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, kinds) for each in value)
    )


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _or(text: str, kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: kind(value) or (isinstance(value, str) and value == text)


def _some(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """`kind`, or None for an argument that is not given."""
    return lambda value: value is None or kind(value)


_PATH = _is(str, os.PathLike)
_KINDS = {
    "model": _Kind(_is(nn.Module), "be a torch.nn.Module", "wrap a function in a module whose forward calls it"),
    "args": _Kind(_sequence(object), "be a tuple or list of the inputs", "write (x,) for one input x"),
    "kwargs": _Kind(
        _some(lambda v: isinstance(v, Mapping) and all(isinstance(k, str) for k in v)),
        "be a dict of inputs by name", "e.g. {'mask': mask}",
    ),
    "plan": _Kind(_is(Plan), "be a Plan", "read a plan file with meshwright.Plan.load"),
    "warm": _Kind(_some(_is(Plan)), "be a Plan", "read a plan file with meshwright.Plan.load"),
    "cluster": _Kind(_is(str, Cluster), "be a text or a Cluster", "e.g. cluster='h100-sxm:8'"),
    "mesh": _Kind(
        lambda v: v is None or _is(str, Mesh)(v) or (len(v) > 0 if _sequence(str, Mesh)(v) else False),
        "be a text or a Mesh, or with a pipeline a list of them", "e.g. mesh='2x4' or mesh='dp=2,tp=4'",
    ),
    "loss": _Kind(_some(callable), "be a function of the model's output", "e.g. loss=lambda out: out.mean()"),
    "constraints": _Kind(
        _sequence(str, Constraint), "be a list of texts or Constraints", "e.g. constraints=['*.weight = S(0)']"
    ),
    "recipe": _Kind(_some(_is(str)), "be the name of a recipe", "e.g. recipe='fsdp'; see `meshwright recipes`"),
    "optimizer": _Kind(_is(str), "be the name of an optimizer", "e.g. optimizer='adamw'"),
    "recompute": _Kind(_is(str), "be auto, none, pointwise or block", "leave it out for auto"),
    "compiled": _Kind(_is(bool), "be True or False", "leave it out for True"),
    "memory_limit_bytes": _Kind(
        _some(_whole(1)), "be a positive whole number of bytes", "e.g. 80 * 2**30, or leave it out for all there is"
    ),
    "replicate": _Kind(_sequence(str), "be a list of ops", "e.g. replicate=['softmax']"),
    "rules": _Kind(_sequence(OpRule), "be a list of OpRules", "see docs/custom-ops.md"),
    "time_limit_s": _Kind(
        lambda v: _number(v) and v > 0, "be a positive number of seconds", "leave it out for the default"
    ),
    "gap": _Kind(lambda v: _number(v) and 0 <= v <= 1, "be a number from 0 to 1", "leave it out for 0.001"),
    "solver": _Kind(_is(str), "be highs or cbc", "leave it out for highs"),
    "name": _Kind(_some(lambda v: isinstance(v, str) and bool(v)), "be a name", "leave it out for the model's class"),
    "on_progress": _Kind(_some(callable), "be a function of (what, best, bound)", "leave it out"),
    "cache": _Kind(_some(_PATH), "be the path of a folder", "e.g. cache='plans'"),
    "pipeline": _Kind(
        _some(_or("auto", _whole(1))), "be a whole number of ranks from 1 up, or 'auto'", "leave it out for none"
    ),
    "microbatches": _Kind(_some(_or("auto", _whole(1))), "be a whole number from 1 up, or 'auto'", "leave it out"),
    "schedule": _Kind(_is(str), "be the name of a schedule", "e.g. schedule='1f1b'"),
    "calibration": _Kind(
        _some(lambda v: _PATH(v) or isinstance(v, Calibration)), "be a Calibration or the path of one",
        "write one with `meshwright calibrate`",
    ),
    "random": _Kind(_whole(0), "be a whole number of plans", "leave it out to check the best plan"),
    "seed": _Kind(_whole(0), "be a whole number from 0 up", "leave it out for 0"),
    "steps": _Kind(_whole(1), "be a whole number from 1 up", "leave it out for 3"),
    "accumulate": _Kind(_whole(1), "be a whole number from 1 up", "leave it out for 1"),
    "build": _Kind(_some(callable), "be a function that makes model, args, kwargs and loss", "leave it out"),
    "device_mesh": _Kind(_some(_is(DeviceMesh)), "be a DeviceMesh", "leave it out for one on the process group"),
    "in_place": _Kind(_is(bool), "be True or False", "leave it out for False"),
    "adapt": _Kind(_is(bool), "be True or False", "leave it out for False"),
    "timeout_s": _Kind(
        lambda v: _number(v) and v > 0, "be a positive number of seconds", "leave it out for the default"
    ),
    "names": _Kind(
        lambda v: isinstance(v, str) or _sequence(str)(v), "be a name of the plan or a list of them",
        "see `meshwright show`",
    ),
    "layout": _Kind(_some(_is(str)), "be a layout in text", "e.g. layout='S(0),R'"),
    "more_memory_bytes": _Kind(_whole(1), "be a positive whole number of bytes", "leave it out for 8 GiB"),
    "limits": _Kind(_some(_is(bool)), "be True or False", "leave it out"),
    "sequence": _Kind(_some(_is(str)), "be the name of a dynamic dim", "e.g. sequence='tokens'"),
    "health": _Kind(_is(Mapping, Health), "be a dict of speeds by device, or a Health", "e.g. {3: 0} for a dead one"),
    "spec": _Kind(_some(_is(str)), "be a SPEC as on the command line", "e.g. spec='llama3-8b'"),
    "horizon_s": _Kind(
        _some(lambda v: _number(v) and v > 0), "be positive seconds", "leave it out"
    ),
    "tries": _Kind(_whole(1), "be a whole number from 1 up", "leave it out"),
    "scheduler": _Kind(_some(callable), "be a function of the optimizer", "leave it out"),
    "checkpoint": _Kind(_some(_PATH), "be the path of a folder", "e.g. checkpoint='checkpoints'"),
    "every": _Kind(_whole(1), "be a whole number of steps from 1 up", "leave it out for 100"),
    "keep": _Kind(_whole(1), "be a whole number from 1 up", "leave it out for 2"),
    "ahead": _Kind(_is(bool), "be True or False", "leave it out for True"),
    "uneven": _Kind(_some(_is(bool)), "be True or False", "leave it out"),
}  # fmt: skip


def check_arguments(**given: Any) -> None:
    """RequestError for the first argument of a wrong kind; names that have no rule here are judged where they are
    used."""
    for name, value in given.items():
        kind = _KINDS.get(name)
        if kind is not None and not kind.fits(value):
            raise RequestError(f"'{name}' must {kind.rule}, got {_shown(value)}; {kind.out}")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = f"the {type(value).__name__} {value!r}" if isinstance(value, str | bytes) else repr(value)
    text = text.replace("\n", " ")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_replicated(replicate: Sequence[str], captured: Captured) -> None:
    """RequestError for the first name in `replicate` that is no op of the model."""
    ops = {op_name(node): str(node.target) for node in captured.ops()}
    for name in replicate:
        if name not in ops and name not in ops.values():
            most = ", ".join([*sorted(ops)[:_NAMED], *(["..."] if len(ops) > _NAMED else [])])
            raise RequestError(f"'replicate' must name ops of the model, got {name[:_SHOWN]!r}; its ops are {most}")

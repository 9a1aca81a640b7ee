"""What the command line puts out: text, or with --json one object on standard output and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from .plans import Adapted, Change, Diff, Plan

__all__ = [
    "Usage",
    "adapted",
    "batch_notes",
    "diff_object",
    "held_stdout",
    "plan_object",
    "progress_line",
    "put_json",
    "put_text",
]

Progress = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Processor time at the start of a command, to say at its end what it took."""

    cpu_s: float

    @classmethod
    def begin(cls) -> Usage:
        """The usage of this process and its ended children until now."""
        return cls(cpu_s=_cpu_s())

    def fields(self) -> dict[str, Any]:
        """The keys `planner_cpu_s` and `planner_peak_memory_bytes`."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {"planner_cpu_s": _cpu_s() - self.cpu_s, "planner_peak_memory_bytes": peak * unit}


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def plan_object(plan: Plan, usage: Usage) -> dict[str, Any]:
    """What `plan --json` says of a plan."""
    predicted = plan.predicted
    return {
        "status": plan.solver.status,
        "step_time_s": predicted.step_time_s,
        "step_time_interval_s": predicted.step_time_interval_s,
        "memory_bytes_per_rank": predicted.memory.peak_bytes,
        "gap": plan.solver.gap,
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "pipeline": _pipeline(plan),
        "recipe": str(plan.recipe()),
        "digest": plan.digest(),
        **usage.fields(),
    }


def _pipeline(plan: Plan) -> dict[str, Any] | None:
    """What the pipeline is, without its schedule."""
    found = plan.pipeline
    if found is None:
        return None
    return {
        "ranks": found.ranks,
        "microbatches": found.microbatches,
        "stages": [stage.first for stage in found.stages],
        "placement": [stage.rank for stage in found.stages],
        "bubble_fraction": found.bubble_fraction,
    }


def batch_notes(plan: Plan) -> list[str]:
    """What is to be said where the spec's own batch, which nobody asked for, does not go round all devices."""
    batch = next((tensor.shape[0] for tensor in plan.inputs if tensor.shape), None)
    size = plan.mesh.size
    if batch is None or batch % size == 0:
        return []
    fitting = -(-batch // size) * size
    return [
        f"note: the global batch is the spec's own, {batch} samples, which {size} devices cannot share evenly; "
        f"--global-batch {fitting} would give each {fitting // size}"
    ]


def adapted(found: Adapted | None) -> dict[str, Any] | None:
    """What `replay --adapt --json` says of what was carried over; names, without the plan."""
    if found is None:
        return None
    return {name: getattr(found, name) for name in found.__struct_fields__ if name != "plan"}


def diff_object(diff: Diff) -> dict[str, Any]:
    """What `diff --json` says."""
    return {
        "same": diff.same,
        "changes": [_fields(change) for change in diff.changes],
        "figures": {figure.name: [figure.before, figure.after] for figure in diff.figures},
    }


def _fields(change: Change) -> dict[str, Any]:
    return {name: getattr(change, name) for name in change.__struct_fields__}


@contextlib.contextmanager
def progress_line(stream: TextIO) -> Iterator[Progress | None]:
    """A line on a terminal that says how a search goes; None elsewhere. The line is gone at the end."""
    if not stream.isatty():
        yield None
        return
    began = time.perf_counter()

    def show(stage: str, objective: float, bound: float) -> None:
        words = f"{time.perf_counter() - began:6.1f} s  {stage}"
        if 0.0 < objective < float("inf"):
            gap = f", gap {100 * max(0.0, 1 - bound / objective):.2f}%" if bound > 0 else ""
            words += f": best {objective:.4g} s{gap}  (Ctrl-C takes it)"
        stream.write(f"\r\x1b[K{words}")
        stream.flush()

    try:
        yield show
    finally:
        stream.write("\r\x1b[K")
        stream.flush()


@contextlib.contextmanager
def held_stdout(as_json: bool) -> Iterator[TextIO]:
    """The real standard output; with --json, what anything else prints meanwhile goes to standard error."""
    if not as_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    real = os.dup(1)
    try:
        os.dup2(2, 1)
        with os.fdopen(os.dup(real), "w", encoding="utf-8") as stream, contextlib.redirect_stdout(sys.stderr):
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


def put_json(stream: TextIO, value: dict[str, Any]) -> None:
    """One JSON object and a newline; no NaN, which is not JSON."""
    stream.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    stream.flush()


def put_text(stream: TextIO, text: str) -> None:
    """`text` and a newline; characters that the terminal's encoding lacks become '?'."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()

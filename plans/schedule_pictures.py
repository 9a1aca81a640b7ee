"""Pictures of a schedule: a text grid, an SVG and a Chrome/Perfetto trace. They return strings and print nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .actions import TimedAction

__all__ = ["schedule_svg", "schedule_text", "schedule_trace"]

Timeline = Sequence[Sequence[TimedAction]]
Memory = Sequence[Sequence[tuple[float, float]]]

_WIDTH, _ROW, _LEFT = 1200.0, 26.0, 60.0
_MEMORY_ROW = 60.0
# Light and dark of one hue per kind, so that micro-batches next to each other differ.
_HUES = {"F": 210, "B": 140, "I": 170, "W": 45}


def schedule_text(timeline: Timeline, *, columns: int = 120) -> str:
    """A line per rank; each column is a share of the makespan and shows the kind that runs there, '.' where none
    does.
    """
    end = max((timed.end for row in timeline for timed in row), default=0.0)
    lines = []
    for rank, row in enumerate(timeline):
        cells = ["."] * columns
        for timed in row:
            if timed.action.is_compute and end > 0:
                first = round(timed.start / end * columns)
                for column in range(first, max(round(timed.end / end * columns), first)):
                    cells[column] = timed.action.kind
        lines.append(f"rank {rank:>2} {''.join(cells)}")
    return "\n".join([*lines, f"        0{f'{end:.6g}'.rjust(columns - 1)}"])


def schedule_svg(timeline: Timeline, *, memory: Memory = (), limits: Sequence[float] | None = None) -> str:
    """The schedule as an SVG: a row per rank, and below it the rank's memory over time with its limit as a line."""
    end = max((timed.end for row in timeline for timed in row), default=0.0) or 1.0
    scale = _WIDTH / end
    parts: list[str] = []
    for rank, row in enumerate(timeline):
        top = rank * _ROW + 4
        parts.append(f'<text x="4" y="{top + 16:g}">rank {rank}</text>')
        parts += (_box(timed, scale, top) for timed in row if timed.action.is_compute)
    top = len(timeline) * _ROW + 16
    peak = max([amount for curve in memory for _, amount in curve] + [*(limits or ())], default=0.0) or 1.0
    for rank, curve in enumerate(memory):
        limit = None if limits is None else limits[rank]
        parts += _memory(rank, curve, limit, end, scale, peak, top + rank * _MEMORY_ROW)
    height = top + len(memory) * _MEMORY_ROW
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 8:g} {height:g}"'
        f' font-family="sans-serif" font-size="11">\n{body}\n</svg>\n'
    )


def _box(timed: TimedAction, scale: float, top: float) -> str:
    action = timed.action
    left, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    shade = 60 + 15 * ((action.microbatch or 0) % 2)
    label = f'<text x="{left + 2:.2f}" y="{top + 15:g}">{action}</text>' if width > 8 * len(str(action)) else ""
    return (
        f'<g><title>{action} {timed.start:g} to {timed.end:g}</title><rect x="{left:.2f}" y="{top:g}"'
        f' width="{width:.2f}"'
        f' height="{_ROW - 4:g}" fill="hsl({_HUES[action.kind]},60%,{shade}%)" stroke="#555"'
        f' stroke-width=".4"/>{label}</g>'
    )


def _memory(
    rank: int,
    curve: Sequence[tuple[float, float]],
    limit: float | None,
    end: float,
    scale: float,
    peak: float,
    top: float,
) -> list[str]:
    """One rank's memory as steps, filled, and its limit dashed."""
    floor = top + _MEMORY_ROW - 6
    height = (_MEMORY_ROW - 14) / peak
    points = [f"{_LEFT:g},{floor:g}"]
    last = 0.0
    for time, amount in curve:
        points += [f"{_LEFT + time * scale:.2f},{floor - last * height:.2f}"]
        points += [f"{_LEFT + time * scale:.2f},{floor - amount * height:.2f}"]
        last = amount
    points += [f"{_LEFT + end * scale:.2f},{floor - last * height:.2f}", f"{_LEFT + end * scale:.2f},{floor:g}"]
    most = max((amount for _, amount in curve), default=0.0)
    lines = [
        f'<text x="4" y="{floor - 12:g}">mem {rank}</text><text x="4" y="{floor:g}">{most:g}</text>',
        f'<polygon points="{" ".join(points)}" fill="#c9d7f0" stroke="#456"/>',
    ]
    if limit is not None:
        level = floor - limit * height
        lines.append(
            f'<line x1="{_LEFT:g}" x2="{_LEFT + end * scale:.2f}" y1="{level:.2f}" y2="{level:.2f}" stroke="#c00"'
            ' stroke-dasharray="4 3"/>'
        )
    return lines


def schedule_trace(*, predicted: Timeline, measured: Timeline = (), memory: Memory = (), unit_s: float = 1e-6) -> str:
    """A trace for Perfetto or chrome://tracing: predicted and measured actions of a rank next to each other.

    unit_s: seconds in the unit of the times; the trace's own is the microsecond.
    """
    factor = unit_s * 1e6
    events: list[dict[str, Any]] = []
    for track, (name, timeline) in enumerate((("predicted", predicted), ("measured", measured))):
        for rank, row in enumerate(timeline):
            thread = 2 * rank + track
            events.append(
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": f"rank {rank} {name}"}}
            )
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": thread, "args": {"sort_index": thread}}
            )
            events += (_event(timed, thread, factor) for timed in row)
    for rank, curve in enumerate(memory):
        events += (
            {"ph": "C", "name": f"memory of rank {rank}", "pid": 0, "ts": time * factor, "args": {"held": amount}}
            for time, amount in curve
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _event(timed: TimedAction, thread: int, factor: float) -> dict[str, Any]:
    action = timed.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind,
        "pid": 0,
        "tid": thread,
        "ts": timed.start * factor,
        "dur": (timed.end - timed.start) * factor,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }

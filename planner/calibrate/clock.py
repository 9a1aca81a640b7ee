"""Times of cases that are run in turn, so that a busy moment of the machine hits all of them and not one.

On a CPU, what one thread does alone is timed by the processor time that it takes, which other work on the machine
hardly changes; what waits for another process, or has several threads, by the clock on the wall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Case", "Timed", "take"]

# Seconds that a case runs in one go: far above the clock's grain, below a time slice of a busy machine.
_GO_S = 1.5e-3
_MOST_CALLS = 500
# Runs of a case before it is timed.
_WARM = 3


@dataclass(slots=True, kw_only=True)
class Case:
    """One thing to time: `run` does it once, `kind`, `sizes` and `dtype` say what it is (see cost_models/fitting.py).
    `host` times the calls and not what they start on a GPU; `waits` says that it waits for other processes; `parts`
    divides the time, `calls` (0: as fit) fixes how often it runs in one go.
    """

    kind: str
    sizes: tuple[int, ...]
    run: Callable[[], object]
    dtype: str = "float32"
    host: bool = False
    waits: bool = False
    parts: int = 1
    calls: int = 0
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What a case took: the middle of its repeats (of those that wait for other processes the least, which other work
    on the machine disturbs least), and how far the middle is above the least, relatively."""

    kind: str
    sizes: tuple[int, ...]
    dtype: str
    measured_s: float
    spread: float


def take(
    cases: Sequence[Case], *, rounds: int, device: str, tell: Callable[[float], None] | None = None
) -> list[Timed]:
    """Run all `cases` in turn, `rounds` times over; `tell` hears the share that is done."""
    for case in cases:
        for _ in range(_WARM):
            seconds = _seconds(case, 1, device)
        case.calls = case.calls or max(1, min(_MOST_CALLS, round(_GO_S / max(seconds, 1e-9))))
    for turn in range(rounds):
        for case in cases:
            case.times.append(_seconds(case, case.calls, device) / case.parts)
        if tell is not None:
            tell((turn + 1) / rounds)
    return [_timed(case) for case in cases]


def _timed(case: Case) -> Timed:
    least, middle = min(case.times), statistics.median(case.times)
    return Timed(
        kind=case.kind,
        sizes=case.sizes,
        dtype=case.dtype,
        measured_s=least if case.waits else middle,
        spread=middle / least - 1.0,
    )


def _seconds(case: Case, calls: int, device: str) -> float:
    """Seconds of one of `calls` runs in a row."""
    run = case.run
    if device != "cuda":
        clock = time.perf_counter if case.waits or torch.get_num_threads() > 1 else time.process_time
        began = clock()
        for _ in range(calls):
            run()
        return (clock() - began) / calls
    torch.cuda.synchronize()
    if case.host:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        seconds = (time.perf_counter() - began) / calls
        torch.cuda.synchronize()
        return seconds
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls

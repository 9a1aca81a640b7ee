"""The schedules that others have published, each a generator of the same value, by the name the command line gives
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ...plans import RequestError, Schedule
from .classic import (
    gpipe,
    interleaved,
    loop_placement,
    looped_bfs,
    one_f_one_b,
    v_placement,
    zb_h1,
    zb_h2,
)
from .patterns import v_half, v_min
from .v_shaped import dual_pipe_v, zb_v

__all__ = [
    "SCHEDULE_NAMES",
    "chunks_of",
    "dual_pipe_v",
    "gpipe",
    "interleaved",
    "loop_placement",
    "looped_bfs",
    "named_schedule",
    "one_f_one_b",
    "v_half",
    "v_min",
    "v_placement",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

SCHEDULE_NAMES = (
    "gpipe",
    "1f1b",
    "interleaved:V",
    "looped-bfs:V",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipev",
)
_ONE: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
_TWO: dict[str, Callable[[int, int], Schedule]] = {"v-half": v_half, "v-min": v_min, "dualpipev": dual_pipe_v}
_MANY: dict[str, Callable[[int, int, int], Schedule]] = {"interleaved": interleaved, "looped-bfs": looped_bfs}
_FORM = re.compile(r"([a-z0-9-]{1,16})(?::(\d{1,3}))?")


def chunks_of(name: str) -> int:
    """How many stages each rank holds under the schedule called `name`; RequestError for an unknown name."""
    match = _FORM.fullmatch(name)
    word, count = (match.group(1), match.group(2)) if match else ("", None)
    if word in _MANY and count is not None and int(count) > 0:
        return int(count)
    if count is None and word in _ONE:
        return 1
    if count is None and (word in _TWO or word == "zb-v"):
        return 2
    raise RequestError(
        f"'schedule' must be one of {', '.join(SCHEDULE_NAMES)} with V a number of stages per rank, got {name[:60]!r}"
    )


def named_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    delay: float = 0.0,
) -> Schedule:
    """The schedule called `name`; `costs` (F, I and W of a stage) and `delay` matter only to ZB-V, which is greedy."""
    chunks = chunks_of(name)
    word = name.split(":")[0]
    if word in _MANY:
        return _MANY[word](ranks, microbatches, chunks)
    if word == "zb-v":
        return zb_v(ranks, microbatches, costs=costs, delay=delay)
    return (_ONE if chunks == 1 else _TWO)[word](ranks, microbatches)

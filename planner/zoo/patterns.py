"""V-Half and V-Min: two stages per rank in a V, with a memory that is fixed beforehand (Qi et al., 2024).

The published rule: one micro-batch is laid out on unit slots, repeated every six slots, and then squeezed. A slot list
per rank and part; the parts are the forward of the first and second chunk, the input gradient of the second and first
chunk, and the weight gradients, which go where a slot is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain

from ...plans import Action, RequestError, Schedule
from .classic import v_placement

__all__ = ["v_half", "v_min"]

_PERIOD = 6
Slots = list[list[int]]


def v_half(ranks: int, microbatches: int) -> Schedule:
    """About half of 1F1B's memory: (p + 2) // 2 micro-batches."""
    gap = 0 if ranks % 2 else 3

    def starts(rank: int) -> tuple[int, int, int, int]:
        return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + gap + 2 * rank - 1, 6 * ranks + gap - rank - 2

    return _from_pattern(ranks, microbatches, starts)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """About a third of 1F1B's memory: (p + 4) // 3 micro-batches."""
    gap = 0 if ranks % 3 else 2

    def starts(rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * ranks - rank - 1, 2 * ranks + gap + rank, 4 * ranks + gap - rank - 1

    return _from_pattern(ranks, microbatches, starts)


def _from_pattern(ranks: int, microbatches: int, starts: Callable[[int], tuple[int, int, int, int]]) -> Schedule:
    if ranks < 2:
        raise RequestError(f"'ranks' must be at least 2 for a V schedule, got {ranks}")
    grid: list[Slots] = [
        [[start + _PERIOD * index for index in range(microbatches)] for start in starts(rank)] for rank in range(ranks)
    ]
    with_weights = [[*parts, list(chain(*_weights(parts)))] for parts in grid]
    squeezed = _as_soon(_squeeze(with_weights, first_half=True))
    again = _squeeze([parts[:4] for parts in squeezed], first_half=False)
    packed = _as_soon([[*parts, list(chain(*_weights(parts)))] for parts in again])
    rows = tuple(_row(parts[:4], rank, ranks) for rank, parts in enumerate(packed))
    return Schedule(microbatches=microbatches, placement=v_placement(ranks), actions=rows)


def _weights(parts: Slots) -> Iterator[list[int]]:
    """Idle slots for the weight gradients, as they fall due: before the rank's last input gradient, then after it."""
    busy = set(chain(*parts[:4]))
    made = set(parts[2]) | set(parts[3])
    last, due, slots = max(busy), 0, []
    for slot in range(last + 1):
        if slot in made:
            due += 1
        elif slot not in busy and due:
            due -= 1
            slots.append(slot)
    yield slots
    yield list(range(last + 1, last + 1 + due))


def _peak(parts: Slots) -> int:
    """The most forwards whose weight gradient is not done; without given weight slots, these go where a slot is
    idle.
    """
    change: dict[int, int] = defaultdict(int)
    weights = parts[4] if len(parts) > 4 else next(_weights(parts))
    for slot in chain(parts[0], parts[1]):
        change[slot] += 1
    for slot in weights:
        change[slot] -= 1
    amount = peak = 0
    for slot in sorted(change):
        amount += change[slot]
        peak = max(peak, amount)
    return peak


def _squeeze(grid: list[Slots], *, first_half: bool) -> list[Slots]:
    """Move actions to earlier idle slots, in the order of their slots, while no rank needs more memory than any did.

    What lies between the first micro-batch's way back to rank 0 and the last one's start stays; with `first_half` what
    comes before moves, too.
    """
    limit = max(_peak(parts) for parts in grid)
    events = sorted(
        (slot, rank, part, index)
        for rank, parts in enumerate(grid)
        for part, slots in enumerate(parts)
        for index, slot in enumerate(slots)
    )
    taken: list[set[int]] = [set() for _ in grid]
    last = len(grid[0][0]) - 1
    phase = 0
    for _slot, rank, part, index in events:
        if phase == 0 and (rank, part) == (0, 3):
            phase = 1
        moves = phase == 2 or (phase == 0 and first_half)
        if phase == 1 and (part, index) == (0, last):
            phase = 2
        if moves:
            _move(grid, rank, part, index, taken[rank], limit)
        taken[rank].add(grid[rank][part][index])
    return grid


def _move(grid: list[Slots], rank: int, part: int, index: int, taken: set[int], limit: int) -> None:
    own = grid[rank]
    slot = own[part][index]
    for earlier in range(_after(grid, rank, part, index) + 1, slot):
        if earlier in taken:
            continue
        own[part][index] = earlier
        if _peak(own) <= limit:
            return
    own[part][index] = slot


def _after(grid: list[Slots], rank: int, part: int, index: int) -> int:
    """The last slot that must lie before this action."""
    own = grid[rank]
    before = [-1]
    if index:
        before.append(own[part][index - 1])
    if part == 4:
        before.append(sorted(own[2] + own[3])[index])
        return max(before)
    if part:
        before.append(own[part - 1][index])
    source = rank - 1 if part in (0, 2) else rank + 1
    if 0 <= source < len(grid):
        before.append(grid[source][part][index])
    return max(before)


def _as_soon(grid: list[Slots]) -> list[Slots]:
    """The same order with each action on the first slot that its data and its rank allow."""
    events = sorted(
        (slot, rank, part, index)
        for rank, parts in enumerate(grid)
        for part, slots in enumerate(parts)
        for index, slot in enumerate(slots)
    )
    free = [-1] * len(grid)
    for _, rank, part, index in events:
        own = grid[rank]
        before = [free[rank]]
        if part != 4:
            before.append(_after(grid, rank, part, index))
        free[rank] = own[part][index] = max(before) + 1
    return grid


def _row(parts: Slots, rank: int, ranks: int) -> tuple[Action, ...]:
    """A rank's order; each weight gradient goes to the chunk with the oldest one due, the later chunk first."""
    names = ((rank, "F"), (2 * ranks - 1 - rank, "F"), (2 * ranks - 1 - rank, "I"), (rank, "I"))
    at = {slot: (part, index) for part, slots in enumerate(parts) for index, slot in enumerate(slots)}
    due = {2: 0, 3: 0}
    done = {2: 0, 3: 0}
    row: list[Action] = []

    def weight(part: int) -> None:
        row.append(Action(names[part][0], "W", done[part]))
        due[part] -= 1
        done[part] += 1

    for slot in range(max(at) + 1):
        if slot in at:
            part, index = at[slot]
            row.append(Action(*names[part], index))
            if part in due:
                due[part] += 1
        elif due[2] or due[3]:
            weight(2 if due[2] else 3)
    for part in (2, 3):
        while due[part]:
            weight(part)
    return tuple(row)

"""How many micro-batches each replica gets: as few seconds as possible for the slowest, the sum unchanged."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from .workbench import Group, Workbench

__all__ = ["begun_at", "earliest", "shared_out"]

# Up to so many micro-batches and replicas every count is priced; beyond, counts start from two prices of each.
_EXACT = 48


def shared_out(
    bench: Workbench, replicas: Sequence[Sequence[Group]], microbatches: int
) -> tuple[tuple[int, ...], float] | None:
    """Micro-batches of each replica and the seconds of the slowest; None where too little memory leaves no replica.

    A replica may get none. Seconds never fall as micro-batches grow, so that giving each to the replica that would
    then be done first is the best.
    """
    if not replicas:
        return None
    kinds = [tuple(sorted(groups, reverse=True)) for groups in replicas]
    if microbatches * len(set(kinds)) <= _EXACT:
        counts = _greedy(lambda kind, count: bench.best(kind, count)[2], kinds, microbatches)
    else:
        mean = max(1, microbatches // len(kinds))
        lines = {}
        for kind in sorted(set(kinds)):
            first, second = bench.best(kind, mean)[2], bench.best(kind, mean + 1)[2]
            each = (second - first) if math.isfinite(second) else math.inf
            lines[kind] = (first - mean * each, each) if math.isfinite(first) else (math.inf, 0.0)
        begun = begun_at(kinds, lines, microbatches)
        counts = _greedy(lambda kind, count: lines[kind][0] + lines[kind][1] * count, kinds, microbatches, begun)
        counts = None if counts is None else _settled(bench, kinds, counts)
    if counts is None:
        return None
    seconds = max(bench.best(kind, count)[2] for kind, count in zip(kinds, counts, strict=True) if count)
    return tuple(counts), seconds


def earliest(total: int, ends: Sequence[Callable[[int], float]], begun: Sequence[int] = ()) -> list[int]:
    """`total` things one after another to whom `ends[i](count)` then says the least; of equal ones to the first.

    The functions must not fall; one that says inf gets nothing more, and at least one must go on. `begun`: what each
    is known to get at least."""
    counts = list(begun) or [0] * len(ends)
    heap = [(end(count + 1), index) for index, (end, count) in enumerate(zip(ends, counts, strict=True))]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        _, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (ends[index](counts[index] + 1), index))
    return counts


def begun_at(
    kinds: Sequence[tuple[Group, ...]], lines: Mapping[tuple[Group, ...], tuple[float, float]], total: int
) -> list[int]:
    """What each is to get at least where seconds are lines over counts: as many as are done before a moment at which
    fewer than `total` are."""

    def done(moment: float) -> dict[tuple[Group, ...], int]:
        return {
            kind: min(total, max(0, math.floor((moment - start) / each))) if math.isfinite(start) and each > 0 else 0
            for kind, (start, each) in lines.items()
        }

    often: dict[tuple[Group, ...], int] = {}
    for kind in kinds:
        often[kind] = often.get(kind, 0) + 1
    low, high = 0.0, max((a + b * total for a, b in lines.values() if math.isfinite(a + b)), default=0.0)
    for _ in range(60):
        middle = (low + high) / 2
        fits = sum(count * often[kind] for kind, count in done(middle).items()) <= total
        low, high = (middle, high) if fits else (low, middle)
    # A hair less, so that rounding gives none that would come later.
    counts = done(low * (1 - 1e-9))
    return [max(0, counts[kind] - 1) for kind in kinds]


def _greedy(
    seconds: Callable[[tuple[Group, ...], int], float],
    kinds: Sequence[tuple[Group, ...]],
    microbatches: int,
    begun: Sequence[int] = (),
) -> list[int] | None:
    if not any(math.isfinite(seconds(kind, 1)) for kind in set(kinds)):
        return None
    return earliest(microbatches, [lambda count, kind=kind: seconds(kind, count) for kind in kinds], begun)


def _settled(bench: Workbench, kinds: Sequence[tuple[Group, ...]], counts: list[int]) -> list[int]:
    """Move single micro-batches from the slowest replica to the one that is done first, as long as that helps."""

    def seconds(index: int, count: int) -> float:
        return bench.best(kinds[index], count)[2] if count else 0.0

    for _ in range(2 * len(kinds)):
        now = [seconds(index, count) for index, count in enumerate(counts)]
        slowest = max(range(len(kinds)), key=lambda index: (now[index], -index))
        # Of replicas of one kind only the one with the fewest counts.
        fewest: dict[tuple[Group, ...], int] = {}
        for index, kind in enumerate(kinds):
            if index != slowest and (kind not in fewest or counts[index] < counts[fewest[kind]]):
                fewest[kind] = index
        after = [(seconds(index, counts[index] + 1), index) for index in fewest.values()]
        if not after or min(after)[0] >= now[slowest] or counts[slowest] == 0:
            break
        counts[slowest] -= 1
        counts[min(after)[1]] += 1
    return counts

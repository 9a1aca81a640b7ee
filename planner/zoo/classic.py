"""Schedules that need no cost: the order of each rank follows from its place, the counts and the published rule.

Every generator returns a `Schedule`; ranks are numbered along the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...plans import Action, RequestError, Schedule

__all__ = ["gpipe", "interleaved", "looped_bfs", "loop_placement", "one_f_one_b", "v_placement", "zb_h1", "zb_h2"]


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s modulo `ranks`."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Forth and back: the second chunk runs from the last rank to the first, the third forth again."""
    forth = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (forth[::-1] if chunk % 2 else forth))


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019)."""
    return looped_bfs(ranks, microbatches, 1)


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Chunk by chunk all forwards, then back chunk by chunk all backwards (Lamy-Poirier, 2023: breadth first)."""
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, "F", index) for stage in stages for index in range(microbatches)]
        backwards = [Action(stage, "B", index) for stage in reversed(stages) for index in range(microbatches)]
        rows.append((*forwards, *backwards))
    return Schedule(microbatches=microbatches, placement=loop_placement(ranks, chunks), actions=tuple(rows))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r starts with p - r - 1 forwards, then one forward and one backward in turn (Narayanan et al., 2019)."""
    return interleaved(ranks, microbatches, 1)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over groups of p micro-batches through `chunks` stages per rank (Narayanan et al., 2021).

    RequestError where the rule is not defined: with several chunks, p must divide the micro-batches.
    """
    if chunks > 1 and microbatches % ranks:
        raise RequestError(
            f"'microbatches' must be a multiple of the {ranks} ranks for an interleaved schedule, got {microbatches};"
            " use another count or schedule"
        )
    total = microbatches * chunks
    rows = []
    for rank in range(ranks):
        before = ranks - rank - 1
        warmup = min(total, before if chunks == 1 else 2 * before + (chunks - 1) * ranks)
        forwards = [_nth(index, rank, ranks, chunks, "F") for index in range(total)]
        backwards = [_nth(index, rank, ranks, chunks, "B") for index in range(total)]
        row = forwards[:warmup]
        for index in range(total):
            row += [*forwards[warmup + index : warmup + index + 1], backwards[index]]
        rows.append(tuple(row))
    return Schedule(microbatches=microbatches, placement=loop_placement(ranks, chunks), actions=tuple(rows))


def _nth(index: int, rank: int, ranks: int, chunks: int, kind: str) -> Action:
    group, place = divmod(index, ranks * chunks)
    chunk, inside = divmod(place, ranks)
    if kind == "B":
        chunk = chunks - 1 - chunk
    return Action(chunk * ranks + rank, kind, group * ranks + inside)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with I for B; rank r lets r weight gradients wait, so that its memory stays 1F1B's (Qi et al., 2023)."""
    rows = [_split(rank, microbatches, warmup=ranks - rank, waiting=rank) for rank in range(ranks)]
    return Schedule(microbatches=microbatches, placement=loop_placement(ranks, 1), actions=tuple(rows))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Rank r starts with 2 (p - r) - 1 forwards and lets 2 r weight gradients wait (Qi et al., 2023)."""
    rows = [_split(rank, microbatches, warmup=2 * (ranks - rank) - 1, waiting=2 * rank) for rank in range(ranks)]
    return Schedule(microbatches=microbatches, placement=loop_placement(ranks, 1), actions=tuple(rows))


def _split(rank: int, microbatches: int, *, warmup: int, waiting: int) -> tuple[Action, ...]:
    """`warmup` forwards, then I, W and F in turn, a W only where more than `waiting` are due."""
    row: list[Action] = []
    done: Counter[str] = Counter()

    def add(kinds: Iterable[str]) -> None:
        for kind in kinds:
            row.append(Action(rank, kind, done[kind]))
            done[kind] += 1

    add("F" * min(warmup, microbatches))
    while done["I"] < microbatches:
        add("I")
        due = done["I"] - done["W"] > waiting
        more = done["F"] < microbatches
        add(("W" if due else "") + ("F" if more else ""))
    add("W" * (microbatches - done["W"]))
    return tuple(row)

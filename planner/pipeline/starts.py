"""Partitions and placements that a search starts from: published ones, stages dealt out by cost, and what an integer
program shares out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..zoo import loop_placement, v_placement

__all__ = ["Shares", "starts"]

# Stages per rank; single units come on top where that makes no more actions.
_STAGES_PER_RANK = (1, 1.5, 2, 3, 4, 6, 8)
_MOST_ACTIONS = 30_000
_Start = tuple[np.ndarray, tuple[int, ...]]


class Shares(NamedTuple):
    """How many units of each kind each rank has, kinds x ranks, and the kind of each unit."""

    counts: np.ndarray
    kinds: np.ndarray


def starts(prefix: np.ndarray, ranks: int, microbatches: int, shares: Shares | None) -> Iterator[_Start]:
    """Cuts and the rank of each stage.

    Stage counts from the number of ranks to single units, of about equal cost: once around, forth and back, and dealt
    out by how much each rank can still take; then `shares`, unit by unit. prefix: sums of F, I, W and memory before
    each unit.
    """
    units = prefix.shape[1] - 1
    counts = {min(units, round(ranks * share)) for share in _STAGES_PER_RANK}
    single = 3 * units * microbatches <= _MOST_ACTIONS
    if single:
        counts.add(units)
    for stages in sorted(counts):
        cuts = _even_cuts(prefix, stages)
        chunks = -(-stages // ranks)
        places = {loop_placement(ranks, chunks)[:stages], v_placement(ranks, chunks)[:stages]}
        if stages > ranks:
            places |= {_dealt(prefix, cuts, ranks, last, turned) for last in (0, ranks - 1) for turned in (False, True)}
        for placement in sorted(places):
            yield cuts, placement
    if shares is not None and single:
        for turned in (False, True):
            placement = _shared(shares, turned)
            # Neighbours on one rank make one stage.
            cuts = np.flatnonzero(np.diff(placement)) + 1
            yield cuts, tuple(placement[np.concatenate([[0], cuts])].tolist())


def _even_cuts(prefix: np.ndarray, stages: int) -> np.ndarray:
    """Cuts into stages of about the same time, each of at least one unit."""
    sums = prefix[:3].sum(axis=0)
    units = prefix.shape[1] - 1
    cuts: list[int] = []
    for stage in range(1, stages):
        cut = int(np.searchsorted(sums, sums[-1] * stage / stages))
        low = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(cut, low), units - (stages - stage)))
    return np.array(cuts, np.int64)


def _dealt(prefix: np.ndarray, cuts: np.ndarray, ranks: int, last: int, turned: bool) -> tuple[int, ...]:
    """Stages dealt out in turn so that all ranks get about the same work, the last stage to rank `last`; `turned`:
    every second round the other way round.
    """
    sums = prefix[:3].sum(axis=0)
    work = np.diff(sums[np.concatenate([[0], cuts, [len(sums) - 1]])])
    room = np.full(ranks, sums[-1] / ranks)
    room[last] = max(room[last] - work[-1], 1e-9 * sums[-1])
    taken = np.zeros(ranks)
    dealt: list[int] = []
    for cost in work[:-1]:
        rank = int(np.argmin((taken + cost * (np.arange(ranks) + 0.5) / ranks) / room))
        taken[rank] += cost
        dealt.append(rank)
    if turned:
        rounds = [dealt[low : low + ranks] for low in range(0, len(dealt), ranks)]
        dealt = [rank for index, row in enumerate(rounds) for rank in (row[::-1] if index % 2 else row)]
    return (*dealt, last)


def _shared(shares: Shares, turned: bool) -> np.ndarray:
    """The rank of each unit, each rank's units of a kind spread over all of that kind; `turned`: ranks the other way
    round.
    """
    placement = np.zeros(len(shares.kinds), np.int64)
    order = np.arange(shares.counts.shape[1])[:: -1 if turned else 1]
    for kind, share in enumerate(shares.counts):
        # The n-th of a rank's units of a kind lies where that share of them is.
        places = [((n + 0.5) / share[rank], turn, rank) for turn, rank in enumerate(order) for n in range(share[rank])]
        placement[shares.kinds == kind] = [rank for _, _, rank in sorted(places)]
    return placement

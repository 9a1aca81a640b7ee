"""A lower bound on the step time of a layer profile, by linear programs of what all ranks together can do until when.

Under a deadline, let counts of actions by kind of unit grow over a row of moments: what is done of an action counts by
its share. The last unit, often a heavy head, and what shares its rank are counted apart from the other ranks. Time
and memory of each side limit its counts; and since each micro-batch goes forth and back unit by unit, forwards must
precede those of the last unit by what lies between, and input gradients follow it likewise. Every schedule that meets
the deadline meets all of this, so that a deadline whose program has no solution is a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_array, eye_array

from .orders import Clock
from .profiles import LayerProfile

__all__ = ["flow_bound"]

# Moments of the first deadlines and of the last ones, which take longer and prove more.
_MOMENTS = ((60, 0.16, 0.002), (150, 0.01, 0.001))
_INFEASIBLE = 2


def flow_bound(
    profile: LayerProfile, ranks: int, microbatches: int, *, limit: float, low: float, seconds: float
) -> float:
    """`low`, a bound, or a larger one that is found in so many CPU seconds; `limit`: the largest memory of a rank."""
    if ranks < 2 or profile.units < 2 or low <= 0:
        return low
    clock = Clock(limit_s=seconds)
    chains = _Chains.of(profile)
    for moments, reach, close in _MOMENTS:
        high = low * (1 + reach)
        while high > low * (1 + close) and clock.left_s > 0:
            deadline = 0.5 * (low + high)
            begun = clock.spent_s
            if _refuted(chains, ranks, microbatches, limit, deadline, moments, clock.left_s):
                low = deadline
            else:
                high = deadline
            if clock.spent_s - begun > clock.left_s:
                return low
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chains:
    """Times of the units but the last, of each the time from and to both ends, its kind, and the last unit."""

    time: np.ndarray
    held: np.ndarray
    kind: np.ndarray
    last: np.ndarray
    last_held: float

    @classmethod
    def of(cls, profile: LayerProfile) -> _Chains:
        """The chains of this profile."""
        units = list(zip(profile.costs, profile.memory, strict=True))
        kinds = list(dict.fromkeys(units[:-1]))
        return cls(
            time=np.array(profile.costs[:-1]).T,
            held=np.array([held for _, held in kinds]),
            kind=np.array([kinds.index(unit) for unit in units[:-1]]),
            last=np.array(profile.costs[-1]),
            last_held=profile.memory[-1],
        )

    def passed(self, part: int, kind: int, *, upwards: bool, spans: np.ndarray) -> np.ndarray:
        """How many units of a kind a chain of F (0) or I (1) passes in such times, up from unit 0 or down to it."""
        lengths = self.time[part]
        ends = np.cumsum(lengths) if upwards else np.cumsum(lengths[::-1])[::-1]
        mine = self.kind == kind
        own = lengths[mine]
        gone = spans[..., None] - (ends[mine] - own)
        share = np.divide(gone, own, out=(gone >= 0).astype(float), where=own > 0)
        return np.clip(share, 0.0, 1.0).sum(axis=-1)


class _Program:
    """Rows of a linear program over vectors of counts, each with one entry per moment."""

    def __init__(self, moments: int, most: list[float]) -> None:
        self.moments = moments
        self.upper = np.repeat(most, moments)
        self.lower = np.zeros_like(self.upper)
        self.upper[::moments] = 0.0
        self.parts: list[tuple[int, int, Any]] = []
        self.limits: list[np.ndarray] = []
        self.rows = 0

    def add(self, terms: list[tuple[int, Any]], limit: np.ndarray | float) -> None:
        """The sum of matrix x vector is at most `limit`."""
        count = 0
        for vector, matrix in terms:
            count = matrix.shape[0]
            self.parts.append((self.rows, vector * self.moments, coo_matrix(matrix)))
        self.limits.append(np.broadcast_to(np.asarray(limit, float), (count,)))
        self.rows += count

    def infeasible(self, seconds: float) -> bool:
        """Whether it is shown in the time that there is no solution."""
        if (self.lower > self.upper + 1e-9).any():
            return True
        row = np.concatenate([block.row + top for top, _, block in self.parts])
        column = np.concatenate([block.col + left for _, left, block in self.parts])
        value = np.concatenate([block.data for _, _, block in self.parts])
        matrix = coo_matrix((value, (row, column)), shape=(self.rows, len(self.upper))).tocsr()
        found = linprog(
            np.zeros(len(self.upper)),
            A_ub=matrix,
            b_ub=np.concatenate(self.limits),
            bounds=np.stack([self.lower, self.upper], axis=1),
            method="highs",
            options={"time_limit": max(0.05, seconds)},
        )
        return found.status == _INFEASIBLE


def _refuted(
    chains: _Chains, ranks: int, microbatches: int, limit: float, deadline: float, moments: int, seconds: float
) -> bool:
    """Whether no schedule ends by `deadline`. False says nothing."""
    kinds = len(chains.held)
    number = [int((chains.kind == kind).sum()) for kind in range(kinds)]
    times = np.linspace(0.0, deadline, moments + 1)
    # Vectors: F, I and W of each kind on the last unit's rank, then on the others, then F, I and W of the last unit,
    # its forwards begun and its input gradients ended.
    most = [float(microbatches * number[kind]) for _ in range(2) for kind in range(kinds) for _ in range(3)]
    program = _Program(moments + 1, [*most, *[float(microbatches)] * 5])
    last = 6 * kinds
    for side in range(2):
        mine = [(3 * (side * kinds + kind), chains.held[kind], _costs(chains, kind)) for kind in range(kinds)]
        if side == 0:
            mine.append((last, chains.last_held, chains.last))
        _time_and_memory(program, mine, 1 if side == 0 else ranks - 1, limit, deadline / moments)
    _last_unit(program, chains, microbatches, deadline, times, last)
    for kind in range(kinds):
        _along(program, chains, kind, microbatches, deadline, times, last)
        for part in range(3):
            # In the end all is done; and what is done on a rank of one part is done there of all.
            own, others = 3 * kind + part, 3 * (kinds + kind) + part
            end = np.zeros((1, moments + 1))
            end[0, -1] = 1.0
            program.add([(own, -end), (others, -end)], -float(microbatches * number[kind]))
            if part:
                program.add([(3 * kind, end), (own, -end)], 0.0)
    return program.infeasible(seconds)


def _costs(chains: _Chains, kind: int) -> np.ndarray:
    return chains.time[:, int(np.argmax(chains.kind == kind))]


def _time_and_memory(
    program: _Program, units: list[tuple[int, float, np.ndarray]], ranks: int, limit: float, between: float
) -> None:
    """What `ranks` ranks do between two moments takes no more than that, F comes before I before W, and it fits."""
    moments = program.moments
    each = eye_array(moments)
    growth = _growth(moments)
    work, held = [], []
    for vector, memory, costs in units:
        for part in range(3):
            program.add([(vector + part, -growth)], 0.0)
            if part:
                program.add([(vector + part, each), (vector + part - 1, -each)], 0.0)
            if costs[part] > 0:
                work.append((vector + part, growth * (costs[part] / between)))
            if 0 < memory and limit < math.inf:
                held.append((vector + part, each * ((1.0 if part == 0 else -0.5) * memory / limit)))
    if work:
        program.add(work, float(ranks))
    if held:
        program.add(held, float(ranks))


def _last_unit(
    program: _Program, chains: _Chains, microbatches: int, deadline: float, times: np.ndarray, last: int
) -> None:
    """The last unit's F and I alternate on one rank, after all forwards of the first micro-batch and before all input
    gradients of the last one.
    """
    moments = program.moments
    each = eye_array(moments)
    begun, ended = last + 3, last + 4
    for fewer, more in ((last, begun), (ended, last + 1)):
        program.add([(fewer, each), (more, -each)], 0.0)
        program.add([(more, each), (fewer, -each)], 1.0)
    for vector in (begun, ended):
        program.add([(vector, -_growth(moments))], 0.0)
    both = float(chains.last[0] + chains.last[1])
    if both > 0:
        through = np.floor((times - chains.time[0].sum()) / both + 1e-9)
        left = np.floor((deadline - chains.time[1].sum() - times) / both + 1e-9)
        at = slice(ended * moments, (ended + 1) * moments)
        program.upper[at] = np.clip(through, 0, microbatches)
        at = slice(begun * moments, (begun + 1) * moments)
        program.lower[at] = np.clip(microbatches - left, 0, microbatches)
    for vector in range(last, last + 5):
        program.lower[(vector + 1) * moments - 1] = microbatches


def _along(
    program: _Program, chains: _Chains, kind: int, microbatches: int, deadline: float, times: np.ndarray, last: int
) -> None:
    """Forwards come a chain after the beginning and before the last unit's, input gradients a chain after it and before
    the end.
    """
    moments = program.moments
    kinds = len(chains.held)
    each = eye_array(moments)
    number = int((chains.kind == kind).sum())
    sides = (3 * kind, 3 * (kinds + kind))
    every = np.arange(microbatches)
    first = chains.time[:, 0]
    from_begin = chains.passed(0, kind, upwards=True, spans=times[:, None] - every * first[0]).sum(axis=1)
    program.add([(side, each) for side in sides], from_begin)
    to_end = chains.passed(1, kind, upwards=True, spans=deadline - times[:, None] - every * first[1]).sum(axis=1)
    program.add([(side + 1, -each) for side in sides], to_end - microbatches * number)
    # The last unit's rank can do so many of its F and I by then, and must have that many behind it.
    through = (every + 1) * float(chains.last[0] + chains.last[1])
    since_first = times[:, None] - chains.time[0].sum() - through
    back = chains.passed(1, kind, upwards=False, spans=since_first).sum(axis=1)
    program.add([(side + 1, each) for side in sides], back)
    until_last = deadline - times[:, None] - chains.time[1].sum() - through
    forth = chains.passed(0, kind, upwards=False, spans=until_last).sum(axis=1)
    program.add([(side, -each) for side in sides], forth - microbatches * number)
    # Of the last unit's forwards begun between two moments, the later one counts; of its input gradients the earlier.
    ahead = times[None, 1:] - times[:, None]
    needed = number - chains.passed(0, kind, upwards=False, spans=np.maximum(ahead, 0.0)) * (ahead > 0)
    program.add([(last + 3, _of_growth(needed)), *((side, -each) for side in sides)], 0.0)
    since = times[:, None] - times[None, :-1]
    possible = chains.passed(1, kind, upwards=False, spans=np.maximum(since, 0.0)) * (since > 0)
    program.add([(last + 4, -_of_growth(possible)), *((side + 1, each) for side in sides)], 0.0)


def _growth(moments: int) -> csr_array:
    """What a count grows by from each moment to the next."""
    return csr_array(np.diff(np.eye(moments), axis=0))


def _of_growth(factors: np.ndarray) -> np.ndarray:
    """Factors of a count at each moment from those of what it grows between them."""
    wide = np.zeros((factors.shape[0], factors.shape[1] + 1))
    wide[:, 1:] += factors
    wide[:, :-1] -= factors
    return wide

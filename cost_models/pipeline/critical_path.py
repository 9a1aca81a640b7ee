"""How long a step of a schedule takes when every action has a time of its own: the longest path, per replica.

`simulate` says everything about one schedule of equal micro-batches; this says only the length, for many replicas and
step after step, in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...plans import Action, RequestError, Schedule
from .kernel import compiled

__all__ = ["CriticalPath"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticalPath:
    """The actions of one schedule in an order in which each comes after all that it waits for.

    `kinds` are its kinds of actions, in the order of the first axis of times. before[a]: the action that the same rank
    does right before, or -1. source[a]: the action whose data it waits for, or -1; boundary[a]: between which stages
    that data passes, or -1 where it stays on the rank.
    """

    kinds: tuple[str, ...]
    stages: int
    microbatches: int
    index: np.ndarray
    before: np.ndarray
    source: np.ndarray
    boundary: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule) -> CriticalPath:
        """The paths of a schedule of F with B, or of F with I and W."""
        schedule.check()
        rows = [[action for action in row if action.is_compute] for row in schedule.actions]
        found = {action.kind for row in rows for action in row}
        kinds = tuple(kind for kind in "FBIW" if kind in found)
        place = {action: (rank, at) for rank, row in enumerate(rows) for at, action in enumerate(row)}
        order: list[Action] = []
        number: dict[Action, int] = {}
        at = [0] * len(rows)
        while len(order) < len(place):
            start = len(order)
            for rank, row in enumerate(rows):
                while at[rank] < len(row) and all(need in number for need in _needs(row[at[rank]], schedule, place)):
                    number[row[at[rank]]] = len(order)
                    order.append(row[at[rank]])
                    at[rank] += 1
            if len(order) == start:
                raise RequestError("'schedule' must not stand still, got ranks that wait for each other; simulate it")
        shape = (len(kinds), schedule.stages, schedule.microbatches)
        where = [(kinds.index(a.kind), a.stage, a.microbatch or 0) for a in order]
        before, source, boundary = [], [], []
        for action in order:
            rank, position = place[action]
            before.append(number[rows[rank][position - 1]] if position else -1)
            need = next((n for n in _needs(action, schedule, place) if place[n][0] != rank), None)
            source.append(-1 if need is None else number[need])
            boundary.append(-1 if need is None else min(need.stage, action.stage))
        return cls(
            kinds=kinds,
            stages=schedule.stages,
            microbatches=schedule.microbatches,
            index=np.array([int(np.ravel_multi_index(one, shape)) for one in where]),
            before=np.array(before),
            source=np.array(source),
            boundary=np.array(boundary),
        )

    def lengths(self, times: np.ndarray, transfers: np.ndarray | None = None) -> np.ndarray:
        """Seconds of a step of each replica; shape (replicas,).

        times: (replicas, kinds, stages, micro-batches), seconds of each action. transfers: (replicas, stages - 1),
        seconds from one stage to the next.
        """
        replicas = times.shape[0]
        rule = (len(self.kinds), self.stages, self.microbatches)
        if times.shape[1:] != rule:
            raise RequestError(f"'times' must have the shape (replicas, *{rule}), got {times.shape}")
        if transfers is None:
            transfers = np.zeros((replicas, max(1, self.stages - 1)))
        flat = np.ascontiguousarray(times.reshape(replicas, -1)[:, self.index])
        out = np.zeros(replicas)
        _longest(flat, transfers, self.before, self.source, self.boundary, np.zeros(len(self.index)), out)
        return out


def _needs(action: Action, schedule: Schedule, place: Mapping[Action, tuple[int, int]]) -> list[Action]:
    """What must have ended before `action`, on whatever rank."""
    stage, index = action.stage, action.microbatch
    if action.kind == "W":
        return [Action(stage, "I", index)]
    needs = [] if action.kind == "F" else [Action(stage, "F", index)]
    other = stage - 1 if action.kind == "F" else stage + 1
    if 0 <= other < schedule.stages:
        whole = Action(other, "F" if action.kind == "F" else "B", index)
        needs.append(whole if whole in place else Action(other, "I", index))
    return needs


@compiled
def _longest(
    times: np.ndarray,
    transfers: np.ndarray,
    before: np.ndarray,
    source: np.ndarray,
    boundary: np.ndarray,
    ends: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the end of the last action of each replica into `out`; `ends` is working space."""
    for replica in range(times.shape[0]):
        last = 0.0
        for action in range(before.shape[0]):
            start = 0.0
            if before[action] >= 0:
                start = ends[before[action]]
            if source[action] >= 0:
                ready = ends[source[action]] + transfers[replica, boundary[action]]
                if ready > start:
                    start = ready
            ends[action] = start + times[replica, action]
            if ends[action] > last:
                last = ends[action]
        out[replica] = last

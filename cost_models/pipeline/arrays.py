"""A pipeline problem and its schedules as the arrays that the compiled loops take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...plans import Action, Schedule
from .costs import StageCosts
from .kernel import CODE_KINDS, Scratch, evaluate

__all__ = ["Arrays", "orders_of", "schedule_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Costs by code (kind * stages + stage), lags by stage, limits and finishing times by rank."""

    place: np.ndarray
    duration: np.ndarray
    memory: np.ndarray
    lag_forward: np.ndarray
    lag_backward: np.ndarray
    limits: np.ndarray
    finish: np.ndarray
    microbatches: int

    @classmethod
    def of(
        cls,
        costs: StageCosts,
        placement: Sequence[int],
        ranks: int,
        microbatches: int,
        limits: Sequence[float] | None,
    ) -> Arrays:
        """The arrays of complete `costs`; without limits they are infinite."""
        stages = range(costs.stages)
        crossing = [costs.transfer(s) if placement[s] != placement[s + 1] else 0.0 for s in range(costs.stages - 1)]
        finish = np.zeros(ranks)
        np.add.at(finish, np.array(placement), np.array(costs.finish))
        return cls(
            place=np.array(placement, np.int64),
            duration=np.array([costs.duration(kind, stage) for kind in CODE_KINDS for stage in stages]),
            memory=np.array([costs.memory(kind, stage) for kind in CODE_KINDS for stage in stages]),
            lag_forward=np.array([0.0, *crossing]),
            lag_backward=np.array([*crossing, 0.0]),
            # The compiled loops compare sums of rounded numbers.
            limits=np.full(ranks, np.inf) if limits is None else np.array(limits, float) + 1e-9,
            finish=finish,
            microbatches=microbatches,
        )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.place)

    def starts(self, word: np.ndarray, first: np.ndarray) -> np.ndarray | None:
        """The start of each action of these orders, None if they stand still."""
        start = np.empty(len(word))
        scratch = Scratch.of(len(first) - 1, self.stages, self.microbatches)
        costs = (self.place, self.duration, self.lag_forward, self.lag_backward)
        sequence = np.zeros(len(word), np.int64)
        moved = evaluate(word, first, *costs, self.microbatches, start, sequence, 0, *scratch.parts())
        return start if moved else None

    def fits(self, word: np.ndarray, first: np.ndarray) -> bool:
        """Whether every rank stays within its limit in this order."""
        rows = (self.memory[word[low:high]] for low, high in zip(first[:-1], first[1:], strict=True))
        return all(row.cumsum().max(initial=0.0) <= limit for row, limit in zip(rows, self.limits, strict=True))


def orders_of(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """The codes of all ranks one after the other, and where each rank's begin."""
    kinds = {kind: index * schedule.stages for index, kind in enumerate(CODE_KINDS)}
    rows = [[kinds[action.kind] + action.stage for action in row if action.is_compute] for row in schedule.actions]
    first = np.cumsum([0, *map(len, rows)])
    return np.array([code for row in rows for code in row], np.int64), first.astype(np.int64)


def schedule_of(word: np.ndarray, first: np.ndarray, place: Sequence[int], microbatches: int) -> Schedule:
    """The schedule that these codes write; micro-batches are numbered as they come."""
    stages = len(place)
    forwards, backwards = [0] * stages, [0] * stages
    due: list[deque[int]] = [deque() for _ in range(stages)]
    rows = []
    for low, high in zip(first[:-1], first[1:], strict=True):
        row = []
        for code in word[low:high].tolist():
            number, stage = divmod(code, stages)
            kind = CODE_KINDS[number]
            if kind == "W":
                index = due[stage].popleft()
            else:
                seen = forwards if kind == "F" else backwards
                index = seen[stage]
                seen[stage] += 1
            if kind == "I":
                due[stage].append(index)
            row.append(Action(stage, kind, index))
        rows.append(tuple(row))
    return Schedule(microbatches=microbatches, placement=tuple(int(rank) for rank in place), actions=tuple(rows))

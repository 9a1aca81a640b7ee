"""A schedule: which rank holds which stage, and in which order each rank does its actions.

It is a value without times; `cost_models.pipeline` says when each action starts and ends under given costs.
"""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .actions import Action, parse_action
from .errors import RequestError

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`placement[stage]` is the rank of a stage, `actions[rank]` what that rank does, in order."""

    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == rank)

    def check(self) -> None:
        """RequestError unless every stage does each micro-batch once, whole, in order and on its own rank."""
        for rank, actions in enumerate(self.actions):
            done: Counter[tuple[int, str]] = Counter()
            for action in actions:
                if action.is_compute:
                    self._check_action(rank, action, done)
        found = Counter(action for actions in self.actions for action in actions if action.is_compute)
        extra = next((a for a in found if a.microbatch is None or not 0 <= a.microbatch < self.microbatches), None)
        if extra is not None:
            raise RequestError(
                f"'schedule' must do micro-batches 0 to {self.microbatches - 1}, got {extra}; "
                "'microbatches' and the rows must agree"
            )
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                forward, whole, split, weight = (found[Action(stage, kind, microbatch)] for kind in "FBIW")
                if forward != 1 or (whole, split, weight) not in ((1, 0, 0), (0, 1, 1)):
                    raise RequestError(
                        f"'schedule' must do stage {stage} for micro-batch {microbatch} as one F and"
                        f" one B, or one F, one I and"
                        f" one W; got {forward} F, {whole} B, {split} I and {weight} W"
                    )

    def _check_action(self, rank: int, action: Action, done: Counter[tuple[int, str]]) -> None:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if not 0 <= stage < self.stages or self.placement[stage] != rank or microbatch is None:
            raise RequestError(f"'schedule' must run a stage on its own rank, got {action} on rank {rank}")
        # A stage may mix B with I and W: its weight gradients are then in order with gaps.
        step = "I" if kind == "B" else kind
        expected = done[stage, step]
        if microbatch < expected if kind == "W" else microbatch != expected:
            raise RequestError(
                f"'schedule' must do each stage's micro-batches in order, got {action} on rank {rank},"
                f" where {expected} is next"
            )
        needed = {"F": None, "I": "F", "B": "F", "W": "I"}[kind]
        if needed is not None and microbatch >= done[stage, needed]:
            raise RequestError(
                f"'schedule' must do {stage}{needed}{microbatch} before {action}, got it after on rank {rank}"
            )
        done[stage, step] = microbatch + 1

    def with_communication(self) -> Schedule:
        """The same with each SEND right after what it sends and each RECV as late as its data and its pair allow.

        Between two ranks the receives are in the order of the sends, for a runtime that matches them first in, first
        out: before an action that needs the k-th tensor of a pair stand all receives of that pair up to the k-th.
        """
        sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for rank, row in enumerate(self.actions):
            for action in row:
                for other, receive in self._outgoing(action):
                    sent[rank, other].append(receive)
        place = {action: (pair, index) for pair, row in sent.items() for index, action in enumerate(row)}
        taken: Counter[tuple[int, int]] = Counter()
        rows: list[tuple[Action, ...]] = []
        for actions in self.actions:
            lowered: list[Action] = []
            for action in actions:
                receive = Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch)
                if action.kind in "FBI" and receive in place:
                    pair, index = place[receive]
                    lowered += sent[pair][taken[pair] : index + 1]
                    taken[pair] = max(taken[pair], index + 1)
                lowered.append(action)
                lowered += (_sending(made) for _, made in self._outgoing(action))
            rows.append(tuple(lowered))
        return Schedule(microbatches=self.microbatches, placement=self.placement, actions=tuple(rows))

    def _outgoing(self, action: Action) -> Iterator[tuple[int, Action]]:
        """The other rank that needs what `action` makes, and how it receives it."""
        if action.kind not in "FBI":
            return
        letter, other = ("F", action.stage + 1) if action.kind == "F" else ("B", action.stage - 1)
        if 0 <= other < self.stages and self.placement[other] != self.placement[action.stage]:
            yield self.placement[other], Action(other, f"RECV_{letter}", action.microbatch)

    def grid(self) -> str:
        """One line per rank, its actions in order; a column per position."""
        width = max((len(str(action)) for actions in self.actions for action in actions), default=1)
        lines = [" ".join(str(action).ljust(width) for action in actions).rstrip() for actions in self.actions]
        return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))

    def to_csv(self) -> str:
        """One row per rank, one action per field: the CSV that torch.distributed.pipelining reads."""
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows([str(action) for action in row] for row in self.actions)
        return stream.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, placement: Sequence[int], microbatches: int) -> Schedule:
        """The schedule that `to_csv` wrote; empty fields are skipped, RequestError for anything unknown."""
        rows = [tuple(parse_action(field) for field in row if field) for row in csv.reader(io.StringIO(text))]
        return cls(microbatches=microbatches, placement=tuple(placement), actions=tuple(rows))


def _sending(receive: Action) -> Action:
    step = -1 if receive.kind == "RECV_F" else 1
    return Action(receive.stage + step, receive.kind.replace("RECV", "SEND"), receive.microbatch)

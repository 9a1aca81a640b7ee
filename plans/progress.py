"""Does a schedule come to its end? Its ranks are walked one action at a time, before any of them runs.

A send is handed over at once and never waits. A receive waits for what its peer sends, and between two ranks the k-th
receive gets the k-th send: nothing else tells the tensors apart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from .actions import Action
from .errors import RequestError
from .schedules import Schedule

__all__ = ["progress"]

_PEER = {"SEND_F": 1, "SEND_B": -1, "RECV_F": -1, "RECV_B": 1}


def progress(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """All actions with their ranks, in an order in which they can be done; a schedule without communication gets its
    own. RequestError where a rank would wait for ever or take one tensor for another: the grid of all actions is
    printed and those that fail stand in > <.
    """
    schedule.check()
    if not any(action.kind in _PEER for row in schedule.actions for action in row):
        schedule = schedule.with_communication()
    walk = _Walk(schedule)
    moved = True
    while moved:
        moved = any([walk.advance(rank) for rank in range(schedule.ranks)])
    stuck = {
        rank: row[at] for rank, (row, at) in enumerate(zip(schedule.actions, walk.at, strict=True)) if at < len(row)
    }
    if stuck:
        rank, action = next(iter(stuck.items()))
        raise RequestError(
            f"'schedule' must come to its end, got {action} on rank {rank} waiting for "
            f"{walk.awaited(rank, action)}, which never comes; {len(stuck)} of {schedule.ranks} ranks wait\n"
            + _grid(schedule, set(stuck.items()))
        )
    left = [pair for pair, queue in walk.sent.items() if queue]
    if left:
        source, target = left[0]
        action = walk.sent[left[0]][0]
        raise RequestError(
            f"'schedule' must receive all that is sent, got {action} from rank {source} to rank {target} left over\n"
            + _grid(schedule, {(source, action)})
        )
    return tuple(walk.order)


class _Walk:
    """Where each rank stands, what it has done, and what is on its way."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [0] * schedule.ranks
        self.done: set[Action] = set()
        self.sent: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.order: list[tuple[int, Action]] = []

    def advance(self, rank: int) -> bool:
        """Do what `rank` can do now; whether that was anything."""
        row, first = self.schedule.actions[rank], self.at[rank]
        while self.at[rank] < len(row):
            action = row[self.at[rank]]
            if action.kind.startswith("RECV"):
                if not self._receive(rank, action):
                    break
            elif not all(any(need in self.done for need in ways) for ways in self._needs(action)):
                break
            if action.kind.startswith("SEND"):
                self.sent[rank, self._peer(action)].append(action)
            self.done.add(action)
            self.order.append((rank, action))
            self.at[rank] += 1
        return self.at[rank] > first

    def awaited(self, rank: int, action: Action) -> Action:
        """What `action` of `rank` waits for."""
        if action.kind.startswith("RECV"):
            return _sent_for(action)
        return next(ways[0] for ways in self._needs(action) if not any(need in self.done for need in ways))

    def _receive(self, rank: int, action: Action) -> bool:
        other = self._peer(action)
        queue = self.sent[other, rank]
        if not queue:
            return False
        wanted = _sent_for(action)
        if queue[0] != wanted:
            raise RequestError(
                f"'schedule' must receive in the order of the sends, got {action} on rank {rank} where {queue[0]} "
                f"comes next from rank {other}: it would take one tensor for another\n"
                + _grid(self.schedule, {(rank, action), (other, queue[0])})
            )
        queue.popleft()
        return True

    def _peer(self, action: Action) -> int:
        stage = action.stage + _PEER[action.kind]
        if not 0 <= stage < self.schedule.stages:
            raise RequestError(f"'schedule' must send between neighbouring stages, got {action} without a neighbour")
        return self.schedule.placement[stage]

    def _needs(self, action: Action) -> Iterator[tuple[Action, ...]]:
        """What must have been done before, each as the actions of which one will do."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == "SEND_F":
            yield (Action(stage, "F", microbatch),)
        elif kind == "SEND_B":
            yield Action(stage, "B", microbatch), Action(stage, "I", microbatch)
        elif kind == "W":
            yield (Action(stage, "I", microbatch),)
        elif kind == "REDUCE_GRAD":
            for index in range(self.schedule.microbatches):
                yield Action(stage, "B", index), Action(stage, "W", index)
        elif kind == "F" and stage > 0:
            yield from self._handed(stage - 1, ("F",), Action(stage, "RECV_F", microbatch))
        elif kind in ("B", "I"):
            yield (Action(stage, "F", microbatch),)
            if stage + 1 < self.schedule.stages:
                yield from self._handed(stage + 1, ("B", "I"), Action(stage, "RECV_B", microbatch))

    def _handed(self, other: int, kinds: tuple[str, ...], receive: Action) -> Iterator[tuple[Action, ...]]:
        """What a neighbouring stage makes: received from another rank, or made on this one."""
        if self.schedule.placement[other] != self.schedule.placement[receive.stage]:
            yield (receive,)
        else:
            yield tuple(Action(other, kind, receive.microbatch) for kind in kinds)


def _sent_for(receive: Action) -> Action:
    return Action(receive.stage + _PEER[receive.kind], receive.kind.replace("RECV", "SEND"), receive.microbatch)


def _grid(schedule: Schedule, marked: set[tuple[int, Action]]) -> str:
    """One line per rank, with the marked actions in > <."""
    rows = (
        " ".join(f">{action}<" if (rank, action) in marked else str(action) for action in row)
        for rank, row in enumerate(schedule.actions)
    )
    return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))

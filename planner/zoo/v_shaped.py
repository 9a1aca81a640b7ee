"""ZB-V and DualPipeV: two stages per rank, laid out in a V, so that first and last stage share a rank."""

from __future__ import annotations

from collections import deque

from ...plans import Action, RequestError, Schedule
from .classic import v_placement

__all__ = ["dual_pipe_v", "zb_v"]

_F, _B, _W = 0, 1, 2


def zb_v(
    ranks: int,
    microbatches: int,
    *,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    delay: float = 0.0,
    memory: float | None = None,
) -> Schedule:
    """The greedy zero-bubble V schedule for equal chunks of cost F, I, W (Qi et al., 2023 and their public scheduler).

    `memory` is the limit in chunks held at once (an F takes one, I and W give back half each), by default 1F1B's, 2 p.
    Weight gradients fill waits; four ways of filling the short ones are tried, and each again knowing its idle times.
    """
    limit = 2.0 * ranks if memory is None else memory
    if ranks < 2 or limit < 2 * ranks:
        raise RequestError(
            f"'memory' must be at least {2 * ranks} chunks on 2 or more ranks, got {limit} on {ranks} ranks"
        )
    best: _Greedy | None = None
    for fill_backward in (True, False):
        for fill_forward in (True, False):
            found = _settled(ranks, microbatches, costs, delay, limit, (fill_forward, fill_backward))
            if best is None or max(found.idle) < max(best.idle):
                best = found
    assert best is not None
    rows = tuple(tuple(row) for row in best.rows)
    return Schedule(microbatches=microbatches, placement=v_placement(ranks), actions=rows)


def _settled(
    ranks: int,
    microbatches: int,
    costs: tuple[float, float, float],
    delay: float,
    limit: float,
    fills: tuple[bool, bool],
) -> _Greedy:
    known: list[float] | None = None
    found = _Greedy(ranks, microbatches, costs, delay, limit, fills, known)
    while True:
        known = found.idle
        again = _Greedy(ranks, microbatches, costs, delay, limit, fills, known)
        if max(again.idle) >= max(found.idle):
            return found
        found = again


class _Greedy:
    """One run of the greedy rule. Parts: forward of chunk 0 and 1, then backward of chunk 1 and 0, as a
    micro-batch goes.
    """

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        costs: tuple[float, float, float],
        delay: float,
        limit: float,
        fills: tuple[bool, bool],
        known_idle: list[float] | None,
    ) -> None:
        self.ranks, self.count, self.costs, self.delay, self.limit = ranks, microbatches, costs, delay, limit
        self.fills, self.known_idle = fills, known_idle
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.idle = [0.0] * ranks
        self.time = [0.0] * ranks
        self.held = [0.0] * ranks
        self.due: list[deque[int]] = [deque() for _ in range(ranks)]
        self.ends: list[list[list[float]]] = [[[] for _ in range(4)] for _ in range(ranks)]
        self.weights = [[0, 0] for _ in range(ranks)]
        self._warm_up()
        for _ in range(2 * microbatches):
            self._backwards()
            self._forwards()
        for rank in range(ranks):
            while self.due[rank]:
                self._weight(rank)

    def _done(self, rank: int, part: int) -> int:
        return len(self.ends[rank][part])

    def _source(self, rank: int, part: int) -> float | None:
        """When the next action of this part has its data from its neighbour; None where it has none or not yet."""
        other = rank - 1 if part in (0, 2) else rank + 1
        if not 0 <= other < self.ranks or self._done(other, part) <= self._done(rank, part):
            return None
        return self.ends[other][part][self._done(rank, part)] + self.delay

    def _stage(self, rank: int, part: int) -> int:
        return rank if part in (0, 3) else 2 * self.ranks - 1 - rank

    def _put(self, rank: int, part: int) -> None:
        ready = self.time[rank]
        source = self._source(rank, part)
        start = ready if source is None else max(ready, source)
        if self.ends[rank][0]:
            self.idle[rank] += start - ready
        kind = _F if part < 2 else _B
        self.rows[rank].append(Action(self._stage(rank, part), "F" if kind == _F else "I", self._done(rank, part)))
        self.time[rank] = start + self.costs[kind]
        self.ends[rank][part].append(self.time[rank])
        self.held[rank] += 1.0 if kind == _F else -0.5
        if kind == _B:
            self.due[rank].append(part)

    def _weight(self, rank: int) -> None:
        part = self.due[rank].popleft()
        self.rows[rank].append(Action(self._stage(rank, part), "W", self.weights[rank][part - 2]))
        self.weights[rank][part - 2] += 1
        self.time[rank] += self.costs[_W]
        self.held[rank] -= 0.5

    def _slack(self, rank: int) -> float:
        """How long this rank may wait without being the one that waits longest."""
        longest = max(self.idle)
        if self.known_idle is not None:
            longest = max(longest, max(self.known_idle) - self.known_idle[rank])
        return longest - self.idle[rank]

    def _fill(self, rank: int, part: int, short_too: bool) -> None:
        source = self._source(rank, part)
        if source is None:
            return
        while self.due[rank] and source >= self.time[rank] + self.costs[_W]:
            self._weight(rank)
        if short_too and self.due[rank] and source - self.time[rank] > self._slack(rank):
            self._weight(rank)

    def _warm_up(self) -> None:
        for rank in range(self.ranks):
            self._put(rank, 0)
        self._put(self.ranks - 1, 1)
        for rank in range(self.ranks - 2, -1, -1):
            arrival = self._source(rank, 1)
            assert arrival is not None
            while (
                self.held[rank] + 2 + 2 * rank <= self.limit
                and self.time[rank] + self.costs[_F] <= arrival
                and self._done(rank, 0) < self.count
            ):
                for other in range(rank + 1):
                    self._put(other, 0)
            self._put(rank, 1)
        turn = 0
        for rank in range(1, self.ranks):
            while self._behind(rank):
                for other in range(self.ranks - 1, rank - 1, -1):
                    if self._done(other, turn) < self.count:
                        self._put(other, turn)
                turn = 1 - turn

    def _behind(self, rank: int) -> bool:
        """Whether a rank has done too few forwards for the rank before it to go on."""
        own = [self._done(rank, part) for part in (0, 1)]
        before = [self._done(rank - 1, part) for part in (0, 1)]
        return sum(own) < sum(before) or own[1] <= before[1] < self.count

    def _backwards(self) -> None:
        turns = [self._backward_part(rank) for rank in range(self.ranks)]
        order = [rank for rank in reversed(range(self.ranks)) if turns[rank] == 3]
        order += [rank for rank in range(self.ranks) if turns[rank] == 2]
        for rank in order:
            self._fill(rank, turns[rank], turns[rank] == 3 or self.fills[1])
            self._put(rank, turns[rank])

    def _backward_part(self, rank: int) -> int:
        if self._done(rank, 3) >= self._done(rank, 2):
            return 2
        ready = rank == self.ranks - 1 or self._source(rank, 3) is not None or self._done(rank, 2) >= self.count
        return 3 if ready else 2

    def _forwards(self) -> None:
        for rank in range(self.ranks):
            part = self._forward_part(rank)
            if part is None:
                continue
            while self.held[rank] + 1 > self.limit:
                self._weight(rank)
            self._fill(rank, part, self.fills[0])
            self._put(rank, part)

    def _forward_part(self, rank: int) -> int | None:
        first, second = self._done(rank, 0), self._done(rank, 1)
        if second >= self.count:
            return None
        if second >= first:
            return 0
        if rank == self.ranks - 1 or self._source(rank, 1) is not None:
            return 1
        return 0 if first < self.count and (rank == 0 or self._source(rank, 0) is not None) else None


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """DeepSeek's DualPipeV (2025): eight steps per rank; F and B of a pair stand next to each other.

    RequestError for fewer than 2 p micro-batches, for which the rule is not defined.
    """
    if microbatches < 2 * ranks:
        raise RequestError(
            f"'microbatches' must be at least {2 * ranks}, twice the ranks, for DualPipeV, got {microbatches}"
        )
    rows = tuple(_dual_row(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule(microbatches=microbatches, placement=v_placement(ranks), actions=rows)


def _dual_row(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    stages = (rank, 2 * ranks - 1 - rank)
    row: list[Action] = []
    done: dict[tuple[str, int], int] = {}
    due: deque[tuple[int, int]] = deque()

    def add(kind: str, chunk: int) -> None:
        index = done.get((kind[0], chunk), 0)
        done[kind[0], chunk] = index + 1
        if kind == "B split":
            row.append(Action(stages[chunk], "I", index))
            due.append((chunk, index))
        else:
            row.append(Action(stages[chunk], kind, index))

    def weight() -> None:
        chunk, index = due.popleft()
        row.append(Action(stages[chunk], "W", index))

    after = ranks - rank - 1
    for _ in range(2 * after):
        add("F", 0)
    for _ in range(rank + 1):
        add("F", 0)
        add("F", 1)
    for _ in range(after):
        add("B split", 1)
        weight()
        add("F", 1)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        add("F", 0)
        add("B", 1)
        add("F", 1)
        add("B", 0)
    for _ in range(after):
        add("B", 1)
        add("F", 1)
        add("B", 0)
    for index in range(2 * (rank + 1)):
        add("B" if index <= rank else "B split", 1 - index % 2)
    for _ in range(after):
        weight()
        add("B split", 0)
    for _ in range(rank + 1):
        weight()
    return tuple(row)

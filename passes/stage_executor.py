"""One pipeline rank doing its row of a schedule: the stages' graphs, and what goes to and comes from its neighbours.

Receives begin one action ahead of their need, so that they run beside compute; between two ranks they stay in the order
of the sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..plans.actions import Action, TimedAction
from ..plans.errors import StepError
from ..plans.progress import progress
from ..plans.schedules import Schedule
from . import _torch
from .channels import Channels, Receiving
from .split import module_of
from .stage_work import StageGraphs, StageWork, drawing
from .weights import keeping

__all__ = ["Executor"]


class Executor:
    """Runs the stages of pipeline rank `rank` by `schedule`, whose other rows are run by others.

    Raises StepError, which names rank and action, when anything fails."""

    def __init__(self, schedule: Schedule, rank: int, channels: Channels) -> None:
        progress(schedule)
        self.placement, self.rank, self.channels = schedule.placement, rank, channels
        self._schedule, self._row = schedule, schedule.with_communication().actions[rank]
        self._run: dict[tuple[StageGraphs, str], Callable[[list[Any]], tuple]] = {}

    def run(self, works: Mapping[int, StageWork], seed: int) -> list[TimedAction]:
        """Do one step; when each compute action began and ended, in seconds since the epoch."""
        moving: dict[Action, Receiving | list[torch.Tensor]] = {}
        clock = _Clock(self.channels.device)
        action: Action | None = None
        try:
            kept = {stage for stage, work in works.items() if work.program.once}
            for action in tuple(_early(_once(self._row, self._schedule, kept))):
                self._do(action, works, moving, clock, seed)
            action = None
            self.channels.finish()
        except Exception as error:
            self.channels.close()
            at = "after its last action" if action is None else f"in {action}"
            raise StepError(
                f"pipeline rank {self.rank} (process {dist.get_rank()}) failed {at}: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}; "
                "the ranks that wait for it fail as well, look for the first of them"
            ) from error
        return clock.actions()

    def _do(
        self,
        action: Action,
        works: Mapping[int, StageWork],
        moving: dict[Action, Receiving | list[torch.Tensor]],
        clock: _Clock,
        seed: int,
    ) -> None:
        stage, kind = action.stage, action.kind
        if kind.startswith("RECV"):
            graphs = works[stage].at(action)
            forward = kind == "RECV_F"
            expected = graphs.receives if forward else graphs.receives_gradient
            other = self.placement[stage - 1 if forward else stage + 1]
            moving[_key(action)] = self.channels.receive(expected, other)
        elif kind.startswith("SEND"):
            to = stage + 1 if kind == "SEND_F" else stage - 1
            tensors = moving.pop(Action(to, kind[-1], action.microbatch))
            assert isinstance(tensors, list)
            graphs = works[stage].at(action)
            parts = graphs.sends if kind == "SEND_F" else graphs.sends_gradient
            self.channels.send(tensors, parts, self.placement[to])
        else:
            self._compute(action, works[stage], moving, clock, seed)

    def _runs(self, work: StageWork, action: Action) -> Callable[[list[Any]], tuple]:
        """The graph of an action, to be called with a list, which it empties. Gradients of parameters are added up as
        they are made: all of a stage, beside all that were added up before, need not be there at once."""
        graphs, kind = work.at(action), action.kind
        if (graphs, kind) not in self._run:
            graph, passed = graphs.graphs[kind], set(graphs.stage.sends_gradient)
            if kind in ("B", "W"):
                graph = keeping(graph, [None if n in passed else n for n in work.given_by(action)])
            self._run[graphs, kind] = _torch.boxed(module_of(graphs.program, graph))
        return self._run[graphs, kind]

    def _compute(
        self,
        action: Action,
        work: StageWork,
        moving: dict[Action, Receiving | list[torch.Tensor]],
        clock: _Clock,
        seed: int,
    ) -> None:
        found = moving.pop(_key(action), []) if action.kind in ("F", "B", "I") else []
        received = found.wait() if isinstance(found, Receiving) else found
        clock.begin()
        given: list[Any] = work.give(action, received)
        received.clear()
        kept = action.kind in ("B", "W")
        if kept:
            given.append(partial(work.add, action))
        with torch.no_grad(), drawing(work.at(action), action, seed):
            results = self._runs(work, action)(given)
        made = work.take(action, results, kept=kept)
        clock.end(action)
        if action.kind in ("F", "B", "I"):
            to = Action(action.stage + (1 if action.kind == "F" else -1), action.kind, action.microbatch)
            if 0 <= to.stage < len(self.placement):
                moving[_key(to)] = made


def _key(action: Action) -> Action:
    """The compute action, F or B, that what an action receives or hands on is for."""
    return Action(action.stage, "F" if action.kind in ("F", "RECV_F") else "B", action.microbatch)


def _once(row: Sequence[Action], schedule: Schedule, kept: set[int]) -> Iterator[Action]:
    """The row with the parameters that the stages in `kept` keep gathered before their first forward, and each
    stage's gradients reduced right after the last of them."""
    left = dict.fromkeys(range(schedule.stages), schedule.microbatches)
    waiting = set(kept)
    for action in row:
        if action.kind == "F" and action.stage in waiting:
            waiting.remove(action.stage)
            yield Action(action.stage, "UNSHARD")
        yield action
        if action.kind in ("B", "W"):
            left[action.stage] -= 1
            if not left[action.stage]:
                yield Action(action.stage, "REDUCE_GRAD")


def _early(row: Iterator[Action]) -> Iterator[Action]:
    """The row with the receives of each compute action before the action ahead of it."""
    blocks: list[tuple[list[Action], list[Action]]] = []
    receives: list[Action] = []
    for action in row:
        if action.kind.startswith("RECV"):
            receives.append(action)
        elif action.kind.startswith("SEND"):
            blocks[-1][1].append(action)
        else:
            blocks.append((receives, [action]))
            receives = []
    for index, (receives, body) in enumerate(blocks):
        yield from receives if index == 0 else ()
        yield from blocks[index + 1][0] if index + 1 < len(blocks) else ()
        yield from body


class _Clock:
    """When actions ran: by the host's clock, or by events of the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.origin = time.time() - time.perf_counter()
        self.marks: list[tuple[Action, Any, Any]] = []
        self.base: Any = self._now()
        self.began_s = time.time()
        self.start: Any = self.base

    def begin(self) -> None:
        """An action begins."""
        self.start = self._now()

    def end(self, action: Action) -> None:
        """The action that began last ends."""
        self.marks.append((action, self.start, self._now()))

    def actions(self) -> list[TimedAction]:
        """All actions so far; waits for the device."""
        return [TimedAction(action, self._seconds(start), self._seconds(end)) for action, start, end in self.marks]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return self.origin + mark
        mark.synchronize()
        return self.began_s + self.base.elapsed_time(mark) / 1e3

"""Simulated ranks of a pipeline: all stages in one process, in an order in which their ranks could have worked."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from ..plans.actions import Action
from ..plans.errors import CheckError
from ..plans.meshes import Mesh
from ..plans.progress import progress
from ..plans.schedules import Schedule
from .handover import part_of, put_part
from .simulate import run_ranks
from .stage_work import StageGraphs, StageWork, drawing

__all__ = ["run_pipeline"]


def run_pipeline(schedule: Schedule, works: Sequence[Sequence[StageWork]], meshes: Sequence[Mesh]) -> None:
    """Do one training step: `works[stage][i]` is the stage on the i-th rank of its mesh, `meshes[r]` that of pipeline
    rank r.

    RequestError where the schedule would stand still on real ranks, CheckError where ranks of a mesh would, or where
    what one side sends is not what the other expects.
    """
    seed = int(torch.randint(2**62, ()))
    moving: dict[Action, list[list[torch.Tensor]]] = {}
    actions = [Action(stage, "UNSHARD") for stage in range(schedule.stages)]
    actions += [action for _, action in progress(schedule) if action.is_compute]
    actions += [Action(stage, "REDUCE_GRAD") for stage in range(schedule.stages)]
    for action in actions:
        ranks, mesh = works[action.stage], meshes[schedule.placement[action.stage]]
        kind = "F" if action.kind == "F" else "B"
        none: list[list[torch.Tensor]] = [[] for _ in ranks]
        received = none if action.kind in ("W", "UNSHARD", "REDUCE_GRAD") else moving.pop(_to(action, kind, 0), none)
        inputs = [work.give(action, given) for work, given in zip(ranks, received, strict=True)]
        graphs = [work.at(action).graphs[action.kind] for work in ranks]
        with torch.no_grad(), drawing(ranks[0].at(action), action, seed):
            results = run_ranks(graphs, inputs, mesh, ranks[0].at(action).program.constants)
        sent = [work.take(action, result) for work, result in zip(ranks, results, strict=True)]
        to = _to(action, kind, 1 if kind == "F" else -1)
        if action.kind in "FBI" and 0 <= to.stage < schedule.stages:
            moving[to] = _handed_over(action, to, ranks, works[to.stage], sent)


def _handed_over(
    action: Action,
    to: Action,
    givers: Sequence[StageWork],
    takers: Sequence[StageWork],
    sent: Sequence[Sequence[torch.Tensor]],
) -> list[list[torch.Tensor]]:
    """What each rank of the next stage is given: between two ranks parts arrive in the order in which they are sent."""
    ways: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    for giver, (work, tensors) in enumerate(zip(givers, sent, strict=True)):
        graphs = work.at(action)
        parts = graphs.sends if action.kind == "F" else graphs.sends_gradient
        for tensor, some in zip(tensors, parts, strict=True):
            for part in some:
                ways[giver, part.index].append(part_of(tensor, part))
    found = [_taken(work.at(to), to, ways, taker) for taker, work in enumerate(takers)]
    if any(ways.values()):
        raise CheckError(f"all that {action} sends must be received by {to}, some is not")
    return found


def _taken(
    graphs: StageGraphs, to: Action, ways: dict[tuple[int, int], deque[torch.Tensor]], taker: int
) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for one in graphs.receives if to.kind == "F" else graphs.receives_gradient:
        inexact = one.dtype.is_floating_point or one.dtype.is_complex
        # What no part covers must not be right by chance.
        tensor = torch.full(one.shape, float("nan") if inexact else 0, dtype=one.dtype)
        for part in one.parts:
            shape = one.shape if part.box is None else tuple(length for _, length in part.box)
            way = ways[part.index, taker]
            if not way or way[0].shape != shape or way[0].dtype != one.dtype:
                have = f"{way[0].dtype} {list(way[0].shape)}" if way else "nothing"
                raise CheckError(f"{one.name} must come to {to} as {one.dtype} {list(shape)}, got {have}")
            if part.box is None:
                tensor = way.popleft()
            else:
                put_part(tensor, part, way.popleft())
        tensors.append(tensor)
    return tensors


def _to(action: Action, kind: str, step: int) -> Action:
    return Action(action.stage + step, kind, action.microbatch)

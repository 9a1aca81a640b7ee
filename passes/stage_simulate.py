"""Simulated ranks of a pipeline: all stages in one process, in an order in which their ranks could have worked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plans.actions import Action
from ..plans.meshes import Mesh
from ..plans.progress import progress
from ..plans.schedules import Schedule
from .simulate import run_ranks
from .stage_work import StageWork, drawing

__all__ = ["run_pipeline"]


def run_pipeline(schedule: Schedule, works: Sequence[Sequence[StageWork]], mesh: Mesh) -> None:
    """Do one training step: `works[stage][i]` is the stage on the i-th rank of its mesh.

    RequestError where the schedule would stand still on real ranks, CheckError where ranks of a mesh would.
    """
    seed = int(torch.randint(2**62, ()))
    moving: dict[Action, list[list[torch.Tensor]]] = {}
    actions = [Action(stage, "UNSHARD") for stage in range(schedule.stages)]
    actions += [action for _, action in progress(schedule) if action.is_compute]
    actions += [Action(stage, "REDUCE_GRAD") for stage in range(schedule.stages)]
    for action in actions:
        ranks = works[action.stage]
        kind = "F" if action.kind == "F" else "B"
        none: list[list[torch.Tensor]] = [[] for _ in ranks]
        received = none if action.kind in ("W", "UNSHARD", "REDUCE_GRAD") else moving.pop(_to(action, kind, 0), none)
        inputs = [work.give(action, given) for work, given in zip(ranks, received, strict=True)]
        graphs = [work.at(action).graphs[action.kind] for work in ranks]
        with torch.no_grad(), drawing(ranks[0].at(action), action, seed):
            results = run_ranks(graphs, inputs, mesh, ranks[0].at(action).program.constants)
        sent = [work.take(action, result) for work, result in zip(ranks, results, strict=True)]
        if action.kind in "FBI":
            moving[_to(action, kind, 1 if kind == "F" else -1)] = sent


def _to(action: Action, kind: str, step: int) -> Action:
    return Action(action.stage + step, kind, action.microbatch)

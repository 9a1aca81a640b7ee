"""What data parallelism adds to a recipe's step: gathers of weights and reductions of gradients beside compute.

Layers run one after the other on one stream, their weights' gathers and their gradients' reductions on two others that
share the links between replicas (see overlap.py). A few layers are run and the rest follow, since they are alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .collectives import axis_collective_s
from .links import AxisLink, torus_link
from .overlap import sharded_step
from .recipe_layers import Block
from .stacks import Stack
from .systems import System
from .transformers import Transformer

if TYPE_CHECKING:
    from .recipes import Recipe

__all__ = ["data_s", "group_axis"]

_UNITS = 5  # layers or buckets that are run; from then on each adds what the last one added


def group_axis(system: System, members: int, stride: int) -> AxisLink:
    """The links of a group of `members` devices that lie `stride` ranks apart."""
    inside = max(1, min(members, system.devices_per_node // stride)) if stride < system.devices_per_node else 1
    while members % inside:
        inside -= 1
    nodes = members // inside
    intra = system.device.intra_link
    if intra.torus_dims:
        intra = torus_link(intra, system.devices_per_node, inside, stride)
    return AxisLink(group_size=members, nodes=nodes, members_per_node=inside, intra=intra, inter=system.nic)


def data_s(
    model: Transformer,
    recipe: Recipe,
    system: System,
    stack: Stack,
    blocks: list[Block],
    stage_s: np.ndarray,
    ends_s: np.ndarray,
) -> np.ndarray:
    """Seconds that data parallelism adds to one step: what nothing hides, and by what compute is slower beside it.
    `stage_s` and `ends_s` are forward and backward seconds of one micro-batch on the layers of a stage, and on
    embedding and loss."""
    if recipe.dp * recipe.cp == 1:
        return np.zeros(2)
    dense = sum(block.count * block.parameters for block in blocks) / model.layers
    experts = sum(block.count * block.expert_parameters for block in blocks) / model.layers
    layers = max(1, round(model.layers / recipe.pp))
    joined = 1
    bucket_bytes = stack.bucket_bytes if recipe.bucket_bytes is None else recipe.bucket_bytes
    if recipe.shard != "full":  # gradients of several layers are sent in one bucket
        joined = max(1, min(layers, math.ceil(bucket_bytes / (dense * stack.gradient_bytes))))
    layer = _moves_s(recipe, system, stack, dense, experts)
    ends = _moves_s(recipe, system, stack, model.embedding_parameters() / recipe.tp / recipe.pp, 0.0)
    unit = (*(joined * stage_s / layers), *(joined * np.array(layer)))
    last = (*ends_s, *ends)
    count = layers / joined
    often = recipe.steps if recipe.shard == "full" and recipe.pp == 1 else 1
    return _added_s(unit, last, count, recipe, stack, often)


def _added_s(
    unit: tuple[float, ...], last: tuple[float, ...], count: float, recipe: Recipe, stack: Stack, often: int
) -> np.ndarray:
    """Exposed seconds, and those by which compute is slower, when `count` units and the last one run `often` times."""

    regather = recipe.shard == "full" and recipe.pp == 1

    prefetch = stack.prefetch if recipe.prefetch is None else recipe.prefetch

    def added(units: int, passes: int) -> np.ndarray:
        rows = [*[unit] * units, last]
        # Where weights are gathered once in a step, there is one pass; else the second shows what each one more takes.
        run = sharded_step(rows, prefetch=prefetch, drag=stack.contention, regather=regather, passes=passes)
        pure = passes * sum(row[0] + row[1] for row in rows)
        return np.array([run.makespan_s - pure - run.dragged_s, run.dragged_s])

    def of(passes: int) -> np.ndarray:
        if count <= _UNITS:
            return added(max(1, round(count)), passes)
        more = added(_UNITS, passes)
        return more + (count - _UNITS) * np.maximum(0.0, more - added(_UNITS - 1, passes))

    first = of(1)
    return first if often == 1 else first + (often - 1) * np.maximum(0.0, of(2) - first)


def _moves_s(recipe: Recipe, system: System, stack: Stack, dense: float, experts: float) -> tuple[float, float]:
    """Seconds of the gather and of the reduction of so many weights of one device."""
    members = recipe.dp * recipe.cp
    outer = max(1, members * recipe.tp // recipe.ep)
    gathers = reductions = 0.0
    for weights, size, stride in ((dense, members, recipe.tp), (experts, outer, recipe.ep)):
        if weights <= 0 or size == 1:
            continue
        group = recipe.shard_group if recipe.shard == "full" and 0 < recipe.shard_group < size else size
        links = group_axis(system, group, stride)
        sent = weights * stack.gradient_bytes
        if recipe.shard == "none":
            reductions += float(axis_collective_s("all_reduce", sent, links))
            continue
        gathers += float(axis_collective_s("all_gather", weights * stack.parameter_bytes, links))
        reductions += float(axis_collective_s("reduce_scatter", sent, links))
        if group < size:
            between = group_axis(system, size // group, stride * group)
            reductions += float(axis_collective_s("all_reduce", sent / group, between))
    return gathers, reductions

"""A plan as tables for a person: what it costs, where the parameters lie, where the largest communications are."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .layouts import Layout, shard_dim
from .stamps import stamped_block
from .words import (
    axis_words,
    bytes_words,
    dtype_bytes,
    pattern_of,
    pipeline_words,
    placement_words,
    seconds_words,
    shape_words,
)

if TYPE_CHECKING:
    from .meshes import Mesh
    from .pipelines import Pipeline
    from .plan import Crossing, Edge, Node, Plan, Predicted, Tensor

__all__ = ["summarise"]

_BLOCKS_SHOWN = 8
_GROUPS_SHOWN = 60
_MOVES_SHOWN = 12


def summarise(plan: Plan, width: int = 100) -> str:
    """The plan as text of at most `width` columns; coloured only where standard output is a terminal."""
    coloured = sys.stdout is not None and sys.stdout.isatty()
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=max(60, width),
        force_terminal=coloured,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        color_system="standard" if coloured else None,
    )
    for part in _parts(plan):
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _parts(plan: Plan) -> Iterator[RenderableType]:
    yield _header(plan)
    yield Text()
    if plan.pipeline is not None:
        yield _stages(plan.pipeline)
        yield Text()
    if plan.stage_meshes is not UNSET:
        yield _crossings(plan, plan.stage_meshes.crossings)
        yield Text()
    for rank in _first_ranks(plan):
        view = plan.on_rank(rank)
        yield _parameters(view, mixed=plan.stage_meshes is not UNSET)
        yield Text()
    yield from _communications(plan)


def _first_ranks(plan: Plan) -> list[int]:
    """Of each sharding the first pipeline rank that has it, the plan's own first."""
    found: dict[int, int] = {}
    for rank in range(len(plan.meshes())):
        found.setdefault(plan.sharding_of(rank), rank)
    return [found[number] for number in sorted(found)]


def _crossings(plan: Plan, crossings: Sequence[Crossing]) -> Table:
    """What goes from one mesh to another, and how."""
    table = Table(title="Between meshes", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("value", overflow="fold", ratio=1)
    for column in ("leaves as", "lands as", "then"):
        table.add_column(column, overflow="fold")
    table.add_column("takes", justify="right", no_wrap=True)
    shardings = () if plan.stage_meshes is UNSET else plan.stage_meshes.shardings
    meshes = [plan.mesh, *(one.mesh for one in shardings)]
    for one in sorted(crossings, key=lambda one: -one.time_s)[:_MOVES_SHOWN]:
        left, landed = f"{','.join(one.sent)} on {meshes[one.before]}", f"{','.join(one.landed)} on {meshes[one.after]}"
        steps = Text(" then ".join(one.landed_steps))
        table.add_row(Text(one.value), left, landed, steps, seconds_words(one.time_s))
    if len(crossings) > _MOVES_SHOWN:
        table.add_row(f"... and {len(crossings) - _MOVES_SHOWN} more", "", "", "", "")
    return table


def _header(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in _header_rows(plan):
        table.add_row(label, Text(value))
    return table


def _stages(pipeline: Pipeline) -> Table:
    """Where each stage begins and lies, and what a micro-batch takes there."""
    table = Table(title="Stages", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "rank"):
        table.add_column(column, justify="right")
    table.add_column("begins with", overflow="fold")
    for column in ("forward", "input grad", "weight grad", "saved", "held"):
        table.add_column(column, justify="right")
    for number, stage in enumerate(pipeline.stages):
        cost = stage.cost
        figures = ["?"] * 5
        if cost is not None:
            seconds = (cost.forward_s, cost.input_gradient_s, cost.weight_gradient_s)
            figures = [*map(seconds_words, seconds), bytes_words(cost.saved_bytes), bytes_words(cost.held_bytes)]
        table.add_row(str(number), str(stage.rank), stage.first or "the model's first op", *figures)
    return table


def _header_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    model, predicted, solver = plan.model, plan.predicted, plan.solver
    yield "model", f"{model.name}, {model.parameters:,} parameters, {bytes_words(model.parameter_bytes)}"
    if model.blocks:
        yield "blocks", _blocks_words(plan)
    yield "cluster", f"{plan.cluster.label}, {plan.cluster.size} devices"
    yield "mesh", _mesh_words(plan)
    if plan.pipeline is not None:
        yield "pipeline", pipeline_words(plan.pipeline)
    yield "recipe", f"{plan.recipe()}"
    yield "predicted step", f"{seconds_words(predicted.step_time_s)}{_interval_words(predicted)}"
    yield (
        "",
        (
            f"{seconds_words(predicted.compute_s)} compute{_again_words(predicted)}, "
            f"{seconds_words(predicted.exposed_communication_s)} exposed communication, "
            f"{seconds_words(predicted.hidden_communication_s)} hidden, "
            f"{seconds_words(predicted.optimizer_s)} optimizer"
        ),
    )
    yield "memory per device", _memory_words(plan)
    memory = predicted.memory
    yield (
        "",
        (
            f"{bytes_words(memory.parameters_bytes)} parameters, {bytes_words(memory.gradients_bytes)} gradients, "
            f"{bytes_words(memory.optimizer_bytes)} optimizer, {bytes_words(memory.activations_bytes)} activations, "
            f"{bytes_words(memory.gathered_bytes)} gathered parameters, "
            f"{bytes_words(memory.communication_bytes)} communication, {bytes_words(memory.other_bytes)} other"
        ),
    )
    yield (
        "solver",
        (
            f"{solver.status}, gap {100 * solver.gap:.2f}%, "
            f"{solver.choices:,} choices in {seconds_words(solver.seconds)}"
        ),
    )
    yield "costs from", plan.calibration or "not stated"
    whole = Counter(node.op for node in plan.nodes if node.rule == "whole")
    if whole:
        ops = ", ".join(f"{op} ({count})" if count > 1 else op for op, count in sorted(whole.items()))
        yield "run whole", f"{ops}: on every device, for no rule says how to split them (docs/custom-ops.md)"


def _mesh_words(plan: Plan) -> str:
    """The mesh; where pipeline ranks have different ones, each with its ranks."""
    ranks: dict[Mesh, list[int]] = {}
    for rank, mesh in enumerate(plan.meshes()):
        ranks.setdefault(mesh, []).append(rank)
    shown = {mesh: f"{mesh} ({', '.join(axis_words(mesh))})" for mesh in ranks}
    if len(ranks) == 1:
        return shown[plan.mesh]
    return ", ".join(f"{text} on rank {', '.join(map(str, ranks[mesh]))}" for mesh, text in shown.items())


def _interval_words(predicted: Predicted) -> str:
    if predicted.step_time_interval_s is None:
        return ""
    low, high = map(seconds_words, predicted.step_time_interval_s)
    return f", from {low} to {high} as far as prices are known"


def _again_words(predicted: Predicted) -> str:
    return f" ({seconds_words(predicted.recompute_s)} of it recomputed)" if predicted.recompute_s else ""


def _blocks_words(plan: Plan) -> str:
    blocks = plan.model.blocks
    shown = [f"{block.count} of {block.pattern}" for block in blocks[:_BLOCKS_SHOWN]]
    return ", ".join(shown + ([f"and {len(blocks) - len(shown)} kinds more"] if blocks[_BLOCKS_SHOWN:] else []))


def _memory_words(plan: Plan) -> str:
    memory = plan.predicted.memory
    if memory.limit_bytes is None:
        return f"{bytes_words(memory.peak_bytes)} at the peak, no limit"
    share = f" ({100 * memory.peak_bytes / memory.limit_bytes:.0f}%)" if memory.limit_bytes else ""
    return f"{bytes_words(memory.peak_bytes)} at the peak of {bytes_words(memory.limit_bytes)}{share}"


def _parameters(plan: Plan, *, mixed: bool) -> Table:
    table = Table(
        title=f"Parameters on {plan.mesh}" if mixed else "Parameters",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("name", overflow="fold", ratio=1)
    table.add_column("copies", justify="right", no_wrap=True)
    table.add_column("shape", justify="right", overflow="fold")
    table.add_column("per device", justify="right", no_wrap=True)
    for axis in axis_words(plan.mesh):
        table.add_column(Text(axis), overflow="fold")
    groups = _groups(plan)
    for (name, shape, dtype, layout), copies in list(groups.items())[:_GROUPS_SHOWN]:
        size = copies * dtype_bytes(dtype) * _largest_piece(shape, layout, plan.mesh.shape)
        words = [Text(placement_words(placement)) for placement in layout]
        table.add_row(Text(name), str(copies), shape_words(shape), bytes_words(size), *words)
    if len(groups) > _GROUPS_SHOWN:
        table.add_row(f"... and {len(groups) - _GROUPS_SHOWN} more", "", "", "")
    return table


def _largest_piece(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> int:
    """Elements of the first device's piece, which is the largest."""
    sizes = list(shape)
    for placement, parts in zip(layout, mesh, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            sizes[dim] = -(-sizes[dim] // parts)
    return math.prod(sizes)


def _groups(plan: Plan) -> dict[tuple[str, tuple[int, ...], str, Layout], int]:
    """Parameters that differ only by a number in their name, with how many tensors each group stands for."""
    counts = {block.pattern: block.count for block in plan.model.blocks}
    out: dict[tuple[str, tuple[int, ...], str, Layout], int] = {}
    for tensor in plan.parameters:
        key = _group_key(tensor)
        out[key] = out.get(key, 0) + counts.get(stamped_block(tensor.name, counts) or "", 1)
    return out


def _group_key(tensor: Tensor) -> tuple[str, tuple[int, ...], str, Layout]:
    return (pattern_of(tensor.name), tensor.shape, tensor.dtype, tensor.layout)


def _communications(plan: Plan) -> Iterator[RenderableType]:
    moves = sorted(_moves(plan), key=lambda move: -move[0])
    if not moves:
        yield Text("No communication.")
        return
    table = Table(title="Largest communications", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("from", overflow="fold", ratio=1)
    table.add_column("to", overflow="fold", ratio=1)
    table.add_column("steps", overflow="fold")
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("in all", justify="right", no_wrap=True)
    for total, node, edge in moves[:_MOVES_SHOWN]:
        steps = Text(" then ".join(edge.steps))
        table.add_row(Text(edge.source), Text(node.name), steps, str(node.count), seconds_words(total))
    yield table
    rest = moves[_MOVES_SHOWN:]
    if rest:
        yield Text(f"... and {len(rest)} more, {seconds_words(sum(move[0] for move in rest))} in all")


def _moves(plan: Plan) -> Iterator[tuple[float, Node, Edge]]:
    for node in plan.nodes:
        for edge in node.inputs:
            if edge.steps:
                yield edge.time_s * node.count, node, edge

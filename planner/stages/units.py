"""The units that a pipeline's stages are made of: pieces of the forward between which a model may be cut.

A unit is a numbered block, or what lies between blocks, by module. Each is cut out as a stage of its own, so that its
seconds, its share of input and weight gradient and its bytes are those of the very program that a rank would run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx

from ...passes.again import computed_again
from ...passes.blocks import Run
from ...passes.footprint import PARTS, Footprint, footprint
from ...passes.graph import Captured
from ...passes.keeping import kept_once
from ...passes.local import Lookup
from ...passes.naming import block_name, op_name
from ...passes.places import Places, forward_ops, light_ops, stage_starts
from ...passes.stage_lookup import StageLookup
from ...passes.stages import StageProgram, cut_stages
from ...plans.layouts import local_shape
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ..sharding.accumulation import Accumulation
from ..sharding.folding import MIDDLE, Blocks
from ..sharding.optimizers import Optimizer
from .shares import Shares

__all__ = ["Unit", "unit_firsts", "unit_places", "unit_starts", "units_of"]

_CUDA_BYTES = 512
_GRADIENTS = PARTS.index("gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One piece of the forward on one rank. Seconds and bytes of one micro-batch but for the last five.

    first           the op or module it begins with
    forward_s, input_s, weight_s     F, I and W
    saved_bytes     what it keeps from its F to its W (or B), its received inputs included
    forward_bytes, backward_bytes    the most beside parameters, gradients and optimizer within F and within B
    sent_bytes      what it hands to the next unit
    fresh_bytes     the largest gradient of a parameter that its B makes beside those added up before, to which each is
                    added as it is made; 0 where there is one micro-batch
    parameters_bytes, gradients_bytes, optimizer_bytes    held throughout
    step_bytes      what the optimizer makes for a moment
    step_s          reducing gradients and updating, once in a step
    """

    first: str
    forward_s: float
    input_s: float
    weight_s: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    sent_bytes: int
    fresh_bytes: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    step_bytes: int
    step_s: float

    @property
    def held_bytes(self) -> int:
        """What is there throughout the step."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def unit_starts(captured: Captured, blocks: Blocks) -> list[str]:
    """Names of what each unit begins with, in the order of the forward; the first is empty. No unit begins where the
    backward of later ones reads what is computed again from values of earlier ones: that would cross the cut twice."""
    starts = _modules(captured, blocks)
    places = Places(captured, stage_starts(captured, starts), len(starts))
    crossed: set[int] = set()
    for node, original in computed_again(captured).items():
        if node in places.light or places.of[node] != places.of[original]:
            continue
        for reader in node.users:
            home = places.wanted.get(reader, 0)
            crossed |= set(range(places.of[node] + 1, home + 1))
    return [start for index, start in enumerate(starts) if index not in crossed]


def _modules(captured: Captured, blocks: Blocks) -> list[str]:
    """Where a block, or a module between blocks, begins; by an op's own name where earlier ops lie in that module."""
    light = light_ops(captured)
    depth = max((run.path.count(".") + 1 for run in blocks.runs if run.path), default=1)
    starts: list[str] = [""]
    seen: set[str] = set()
    paths: set[str] = set()
    current: str | None = None
    for node in forward_ops(captured):
        name = captured.names[node]
        if node in light:
            continue
        key = block_name(name) or ".".join(name.partition("::")[0].split(".")[:depth])
        if key and key != current and key not in seen:
            if current is not None:
                inside = any(one == key or one.startswith(f"{key}.") for one in paths)
                starts.append(name if inside else key)
            seen.add(key)
            current = key
        paths.add(name.partition("::")[0])
    return starts


def unit_firsts(captured: Captured, blocks: Blocks) -> list[str]:
    """Where the units of the whole model begin, in the order of the forward: those that stand for others once for
    each."""
    return [first for _, first in unit_places(unit_starts(captured, blocks), blocks)]


def unit_places(starts: Sequence[str], blocks: Blocks) -> list[tuple[int, str]]:
    """The units of the whole model: which of the captured ones, that begin at `starts`, stands for each, and where it
    begins."""
    found: list[tuple[int, str]] = []
    middle: list[int] = []
    run: Run | None = None

    def repeated() -> list[tuple[int, str]]:
        names = _numbered([starts[at] for at in middle], run)
        return [(middle[number % len(middle)], name) for number, name in enumerate(names)]

    for at, first in enumerate(starts):
        place = blocks.place(f"{first}.") if first else None
        if place is not None and place[0] in blocks.cut and place[1] == MIDDLE:
            run = place[0]
            middle.append(at)
            continue
        found += [*repeated(), (at, first)]
        middle = []
    return [*found, *repeated()]


def units_of(
    captured: Captured,
    plan: Plan,
    blocks: Blocks,
    shares: Shares,
    accumulation: Accumulation,
    *,
    starts: Sequence[str] | None = None,
) -> list[Unit]:
    """The units of a planned model, as many as the whole model has: those of the repetition that stands for others are
    there once for each. `starts` are where units begin in a model that is captured whole, by default all places."""
    optimizer = Optimizer.of(plan.options.optimizer)
    starts = unit_starts(captured, blocks) if starts is None else starts
    named = {captured.names[node]: seconds for node, seconds in shares.ops.items()}
    programs = cut_stages(captured, starts)
    made = [
        _unit(stage, first, plan, named, shares.steps, optimizer, accumulation)
        for stage, first in zip(programs, starts, strict=True)
    ]
    return [replace(made[at], first=first) for at, first in unit_places(starts, blocks)]


def _numbered(firsts: Sequence[str], run: Run | None) -> list[str]:
    """The names `firsts` of the second repetition of a run, once for each that it stands for."""
    if run is None or not firsts:
        return []
    found: list[str] = []
    for repetition in range(MIDDLE, run.count - 1):
        for first in firsts:
            place = run.place(f"{first}.")
            assert place is not None
            found.append(place[1].put(f"{first}.", str(place[1].numbers[repetition]))[:-1])
    return found


def _unit(
    stage: StageProgram,
    first: str,
    plan: Plan,
    seconds: Mapping[str, float],
    steps: Mapping[str, float],
    optimizer: Optimizer,
    accumulation: Accumulation,
) -> Unit:
    captured, mesh = stage.captured, plan.mesh
    find = StageLookup(plan, stage)
    needed = _for_input(stage)
    forward = backward = weight = 0.0
    for node in captured.ops():
        spent = seconds.get(captured.names[node], 0.0)
        if node not in captured.backward:
            forward += spent
        elif node in needed:
            backward += spent
        else:
            weight += spent
    cpu = plan.cluster.device == "cpu"
    walked = footprint(
        captured,
        find,
        mesh,
        (0,) * mesh.ndim,
        early=plan.options.prefetch,
        device=torch.device("cpu" if cpu else "cuda"),
        rounds_to=1 if cpu else _CUDA_BYTES,
        once=kept_once(captured, find) if accumulation.once else (),
    )
    return _with_memory(
        Unit(
            first=first, forward_s=forward, input_s=backward, weight_s=weight,
            saved_bytes=0, forward_bytes=0, backward_bytes=0, sent_bytes=_sent(stage, find, mesh),
            fresh_bytes=0, parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, step_bytes=0,
            step_s=sum(s for name, s in steps.items() if name in walked.parameters),
        ),
        stage, walked, optimizer, _added_up(stage, find, mesh) if accumulation.unreduced else None,
        cpu=cpu, accumulates=accumulation.microbatches > 1,
    )  # fmt: skip


def _with_memory(
    unit: Unit,
    stage: StageProgram,
    walked: Footprint,
    optimizer: Optimizer,
    unreduced: list[int] | None,
    *,
    cpu: bool,
    accumulates: bool,
) -> Unit:
    received = sum(walked.sources[name] for name in stage.receives)
    held = sum(walked.sources.values()) - received
    trained = [walked.sources[n] for n in walked.gradients if n in walked.parameters]
    whole = sum(trained)
    after = int(walked.forward[-1].after.sum()) if walked.forward else held + received
    saved = max(0, after - held - unit.sent_bytes)
    added = trained if unreduced is None else unreduced
    backward = [m.peak.sum() - m.peak[_GRADIENTS] for m in walked.backward]
    return replace(
        unit,
        saved_bytes=saved,
        forward_bytes=int(max((m.peak.sum() for m in walked.forward), default=held)) - held,
        backward_bytes=int(max(backward, default=held)) - held,
        fresh_bytes=max(added, default=0) if accumulates else 0,
        parameters_bytes=held,
        gradients_bytes=sum(added),
        optimizer_bytes=optimizer.states * whole,
        step_bytes=optimizer.each * max(trained, default=0) if cpu else optimizer.together * whole,
    )


def _added_up(stage: StageProgram, find: Lookup, mesh: Mesh) -> list[int]:
    """Bytes of each gradient of the first rank's parameters before they are reduced."""
    found: list[int] = []
    for source in stage.captured.sources.values():
        node = stage.captured.grads.get(source.name)
        if source.kind != "parameter" or node is None:
            continue
        maker, output = (node.args[0], node.args[1]) if op_name(node) == "getitem" else (node, 0)
        layout = find(stage.captured.names[maker]).outputs[output]  # type: ignore[index]
        assert layout is not None
        shape = local_shape(source.shape, layout, mesh.shape, (0,) * mesh.ndim)
        found.append(int(np.prod(shape, dtype=np.int64)) * source.dtype.itemsize)
    return found


def _sent(stage: StageProgram, find: Lookup, mesh: Mesh) -> int:
    """Bytes of the pieces that the first rank hands to the next unit."""
    total = 0
    named = {name: node for node, name in stage.captured.names.items()}
    for at, name in enumerate(stage.sends):
        value = named[name].meta["val"]
        layout = find(f"output.{at}::output").outputs[0]
        assert layout is not None
        shape = local_shape(tuple(value.shape), layout, mesh.shape, (0,) * mesh.ndim)
        total += int(np.prod(shape, dtype=np.int64)) * value.element_size()
    return total


def _for_input(stage: StageProgram) -> set[fx.Node]:
    """The backward ops that the gradients sent to the unit before need."""
    stack = [stage.captured.grads[name] for name in stage.sends_gradient]
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed

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

from ..passes.again import computed_again
from ..passes.blocks import Run
from ..passes.footprint import PARTS, Footprint, footprint
from ..passes.graph import Captured
from ..passes.local import Lookup
from ..passes.naming import block_name
from ..passes.places import Places, forward_ops, light_ops, stage_starts
from ..passes.stage_lookup import StageLookup
from ..passes.stages import StageProgram, cut_stages
from ..plans.layouts import local_shape
from ..plans.meshes import Mesh
from ..plans.plan import Plan
from .folding import MIDDLE, Blocks
from .optimizers import Optimizer
from .shares import Shares

__all__ = ["Unit", "unit_starts", "units_of"]

_CUDA_BYTES = 512
_GRADIENTS = PARTS.index("gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One piece of the forward on one rank. Seconds and bytes of one micro-batch but for the last four.

    first           the op or module it begins with
    forward_s, input_s, weight_s     F, I and W
    saved_bytes     what it keeps from its F to its B, its received inputs included
    kept_bytes      what of that, and what I leaves for W, is there between I and W
    forward_bytes, backward_bytes    the most beside parameters, gradients and optimizer within F and within B
    sent_bytes      what it hands to the next unit
    parameters_bytes, gradients_bytes, optimizer_bytes    held throughout
    step_bytes      what the optimizer makes for a moment
    step_s          reducing gradients and updating, once in a step
    """

    first: str
    forward_s: float
    input_s: float
    weight_s: float
    saved_bytes: int
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    sent_bytes: int
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
    light = light_ops(captured)
    depth = max((run.path.count(".") + 1 for run in blocks.runs if run.path), default=1)
    starts: list[str] = [""]
    seen: set[str] = set()
    current: str | None = None
    for node in forward_ops(captured):
        name = captured.names[node]
        if node in light:
            continue
        key = block_name(name) or ".".join(name.partition("::")[0].split(".")[:depth])
        if key and key != current and key not in seen:
            if current is not None:
                starts.append(key)
            seen.add(key)
            current = key
    return starts


def units_of(captured: Captured, plan: Plan, blocks: Blocks, shares: Shares, *, microbatches: int) -> list[Unit]:
    """The units of a planned model, as many as the whole model has: those of the repetition that stands for others are
    there once for each."""
    optimizer = Optimizer.of(plan.options.optimizer)
    starts = unit_starts(captured, blocks)
    named = {captured.names[node]: seconds for node, seconds in shares.ops.items()}
    found: list[Unit] = []
    middle: list[Unit] = []
    run: Run | None = None
    for stage, first in zip(cut_stages(captured, starts), starts, strict=True):
        unit = _unit(stage, first, plan, named, shares.steps, optimizer, microbatches)
        place = blocks.place(f"{first}.") if first else None
        stands = place is not None and place[0] in blocks.cut and place[1] == MIDDLE
        if middle and not stands:
            found += _repeated(middle, run)
            middle = []
        if stands and place is not None:
            run = place[0]
            middle.append(unit)
        else:
            found.append(unit)
    return [*found, *_repeated(middle, run)]


def _repeated(units: Sequence[Unit], run: Run | None) -> list[Unit]:
    """The units of the second repetition of a run, and the same for each that it stands for."""
    if run is None or not units:
        return []
    found: list[Unit] = []
    for repetition in range(MIDDLE, run.count - 1):
        for unit in units:
            place = run.place(f"{unit.first}.")
            assert place is not None
            found.append(replace(unit, first=place[1].put(f"{unit.first}.", str(place[1].numbers[repetition]))[:-1]))
    return found


def _unit(
    stage: StageProgram,
    first: str,
    plan: Plan,
    seconds: Mapping[str, float],
    steps: Mapping[str, float],
    optimizer: Optimizer,
    microbatches: int,
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
    )
    return _with_memory(
        Unit(
            first=first, forward_s=forward, input_s=backward, weight_s=weight,
            saved_bytes=0, kept_bytes=0, forward_bytes=0, backward_bytes=0, sent_bytes=_sent(stage, find, mesh),
            parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, step_bytes=0,
            step_s=sum(s for name, s in steps.items() if name in walked.parameters),
        ),
        stage, walked, optimizer, cpu=cpu, accumulates=microbatches > 1,
    )  # fmt: skip


def _with_memory(
    unit: Unit, stage: StageProgram, walked: Footprint, optimizer: Optimizer, *, cpu: bool, accumulates: bool
) -> Unit:
    received = sum(walked.sources[name] for name in stage.receives)
    held = sum(walked.sources.values()) - received
    trained = [walked.sources[n] for n in walked.gradients if n in walked.parameters]
    whole = sum(trained)
    after = int(walked.forward[-1].after.sum()) if walked.forward else held + received
    saved = max(0, after - held - unit.sent_bytes)
    # Gradients of one micro-batch are there beside the sums of all; of a single one they are the sum.
    backward = [m.peak.sum() - (m.peak[_GRADIENTS] if not accumulates else 0) for m in walked.backward]
    return replace(
        unit,
        saved_bytes=saved,
        kept_bytes=saved,
        forward_bytes=int(max((m.peak.sum() for m in walked.forward), default=held)) - held,
        backward_bytes=int(max(backward, default=held)) - held,
        parameters_bytes=held,
        gradients_bytes=whole,
        optimizer_bytes=optimizer.states * whole,
        step_bytes=optimizer.each * max(trained, default=0) if cpu else optimizer.together * whole,
    )


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

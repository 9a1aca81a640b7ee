"""The memory figure of a plan, counted: the very program of its fullest rank, walked (passes/footprint.py), plus the
optimizer. What the solver limits (timeline.py) is an estimate; this is what a plan reports and must fit.

Of a deep model three blocks were captured. Every block between adds the same: its parameters, what it saves, its
gradients. So what the middle one adds from its end to the next one's is added once for each that was left out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...passes.blocks import Run
from ...passes.footprint import PARTS, Footprint, Moment, footprint
from ...passes.graph import Captured, values_of
from ...passes.local import Lookup
from ...passes.lookup import PlanLookup
from ...plans.layouts import Layout, shard_dim
from ...plans.meshes import Mesh
from ...plans.plan import Memory, Node, Plan
from .folding import CAPTURED, MIDDLE, Blocks
from .optimizers import Optimizer

__all__ = ["Count", "counted"]

# What the CUDA caching allocator hands out is a multiple of this (c10/core/AllocatorConfig.h); the CPU's is exact.
_CUDA_BYTES = 512
_PARAMETERS, _OPTIMIZER, _ACTIVATIONS, _OTHER = (
    PARTS.index(name) for name in ("parameters", "optimizer", "activations", "other")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The figure of a plan's fullest rank, and its bytes by the name of the op that runs: the most at any moment of it,
    the optimizer's step under the empty name."""

    memory: Memory
    profile: Mapping[str, int]


def counted(captured: Captured, plan: Plan, blocks: Blocks, limit: int | None) -> Count:
    """Bytes on the fullest rank of `plan` over a training step. `captured` is the model that the plan is for, by three
    of the blocks of each list that `blocks` calls cut."""
    lookup = PlanLookup(plan)

    def find(name: str) -> Node:
        return lookup(name)

    optimizer = Optimizer.of(plan.options.optimizer)
    ranks = [_rank(captured, plan, find, at, blocks, optimizer) for at in _ranks(captured, plan, find)]
    names, moments = max(ranks, key=lambda rank: int(rank[1].sum(axis=1).max()))
    totals = moments.sum(axis=1)
    profile: dict[str, int] = {}
    for name, total in zip(names, totals.tolist(), strict=True):
        profile[name] = max(total, profile.get(name, 0))
    parts = {f"{name}_bytes": size for name, size in zip(PARTS, _parts(moments[totals.argmax()]), strict=True)}
    return Count(memory=Memory(**parts, peak_bytes=int(totals.max()), limit_bytes=limit), profile=profile)


def _parts(worst: np.ndarray) -> list[int]:
    """Bytes by part without negative ones: the same bytes may be named after a move in one block and after an op in
    the next."""
    short = np.minimum(worst, 0)
    worst = worst - short
    worst[_ACTIVATIONS] += short.sum()
    return [int(n) for n in worst]


def _ranks(captured: Captured, plan: Plan, find: Lookup) -> Sequence[tuple[int, ...]]:
    """Where on the mesh the fullest rank may be. Ranks hold alike where everything divides; where it does not, the
    first along an axis holds the largest pieces, and the last pads the smallest ones and zeroes what others keep."""
    mesh = plan.mesh
    first = (0,) * mesh.ndim
    if not _uneven(captured, plan, find):
        return [first]
    return list(itertools.product(*[sorted({0, n - 1}) for n in mesh.shape]))


def _uneven(captured: Captured, plan: Plan, find: Lookup) -> bool:
    steps = (text for node in plan.nodes for edge in node.inputs for text in edge.steps)
    if any(text.startswith("keep_first") for text in steps):
        return True
    for node in (*captured.sources, *captured.ops()):
        name = captured.names.get(node)
        if name is None or getattr(node.target, "__name__", "") == "getitem":
            continue
        for value, layout in zip(values_of(node), find(name).outputs, strict=False):
            if value is not None and layout is not None and not _even(tuple(value.shape), layout, plan.mesh):
                return True
    return False


def _even(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    parts = [1] * len(shape)
    for placement, size in zip(layout, mesh.shape, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            parts[dim] *= size
    return all(n % p == 0 for n, p in zip(shape, parts, strict=True))


def _rank(
    captured: Captured, plan: Plan, find: Lookup, at: tuple[int, ...], blocks: Blocks, optimizer: Optimizer
) -> tuple[list[str], np.ndarray]:
    """For each moment of the rank at the mesh position `at`, the op that runs and bytes by part."""
    cpu = plan.cluster.device == "cpu"
    walked = footprint(
        captured,
        find,
        plan.mesh,
        at,
        early=plan.options.prefetch,
        device=torch.device("cpu" if cpu else "cuda"),
        rounds_to=1 if cpu else _CUDA_BYTES,
        compiled=plan.options.compiled,
    )
    steps = (*walked.forward, *walked.backward)
    # A step without ops holds what it is given.
    last = steps[-1].after if steps else _given(walked)
    moments = np.vstack([*(m.peak for m in steps), last])
    for run in blocks.cut:
        moments = moments + (run.count - CAPTURED) * _per_block(walked, blocks, run)
    state, scratch = _optimizer(captured, walked, blocks, optimizer, cpu)
    moments[:, _OPTIMIZER] += state
    moments[-1, _OTHER] += scratch
    return [*(m.origin for m in steps), ""], moments


def _given(walked: Footprint) -> np.ndarray:
    """Bytes by part of the sources alone."""
    found = np.zeros(len(PARTS), dtype=np.int64)
    for name, size in walked.sources.items():
        found[_PARAMETERS if name in walked.parameters else _OTHER] += size
    return found


def _per_block(walked: Footprint, blocks: Blocks, run: Run) -> np.ndarray:
    """What one more block in `run` adds at each moment, by part, and at the step of the optimizer: its sources, and
    what the middle one holds when the forward ends, when the backward begins and when that ends."""
    count = len(walked.forward)
    added = np.zeros((count + len(walked.backward) + 1, len(PARTS)), dtype=np.int64)
    kept, saved, left = (_held(ends, blocks, run) for ends in (walked.kept, walked.saved, walked.left))
    ahead, behind = _ops(walked.forward, blocks, run), _ops(walked.backward, blocks, run)
    if ahead[MIDDLE]:
        # Within the middle block the last of the left-out ones counts, or the first: whichever holds more.
        added[min(ahead[MIDDLE]) : count] += kept
    if behind[MIDDLE]:
        first, after = (count + min(ops, default=len(walked.backward)) for ops in (behind[MIDDLE], behind[0]))
        added[count:first] += saved
        added[first:after] += max(saved, left, key=np.sum)
        added[after:] += left
    else:
        added[count:] += saved
    for name, size in walked.sources.items():
        if blocks.captured(name) == (run, MIDDLE):
            added[:, _PARAMETERS if name in walked.parameters else _OTHER] += size
    return added


def _held(ends: Mapping[str, np.ndarray], blocks: Blocks, run: Run) -> np.ndarray:
    """Bytes by part of what the middle block of `run` made and holds."""
    zero = np.zeros(len(PARTS), dtype=np.int64)
    return sum((size for name, size in ends.items() if blocks.captured(name) == (run, MIDDLE)), start=zero)


def _ops(moments: Sequence[Moment], blocks: Blocks, run: Run) -> list[list[int]]:
    """For each captured block of `run`, the moments of its ops."""
    found: list[list[int]] = [[] for _ in range(CAPTURED)]
    for index, moment in enumerate(moments):
        place = blocks.captured(moment.origin) if moment.op else None
        if place is not None and place[0] == run:
            found[place[1]].append(index)
    return found


def _optimizer(
    captured: Captured, walked: Footprint, blocks: Blocks, optimizer: Optimizer, cpu: bool
) -> tuple[int, int]:
    """Bytes of the optimizer's state, and what its step makes for a moment."""
    trained = {n: walked.sources[n] for n in walked.gradients if n in walked.parameters}
    times = {name: blocks.share(name) for name in trained}
    whole = sum(size * times[name] for name, size in trained.items())
    state = optimizer.states * whole
    if optimizer.counts and cpu:
        state += 4 * sum(times.values())
    scratch = optimizer.each * max(trained.values(), default=0) if cpu else optimizer.together * whole
    return state, scratch

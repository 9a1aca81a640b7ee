"""Which replicas of unlike sizes survivors can train as, and how they share a batch: by speed, in whole samples, or
micro-batches where there is a pipeline.

The ranks of a plan are taken for replicas along the first axis of its mesh. Each one that is hurt goes on with those of
its devices that are fastest together, on a mesh or pipeline of its own, and is split by the same search."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...cost_models.devices import load_device
from ...cost_models.links import cluster_links
from ...passes.microbatches import samples_of
from ...plans.errors import Infeasible, RequestError
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ...plans.uneven import Portion, shared_out
from ...plans.words import dtype_bytes
from ..replanning.choices import Choice
from ..replanning.replan import slowed
from ..replanning.solved import Solved

__all__ = ["Group", "Portions", "groups_by_rule", "groups_of", "portions_for"]

_FORM = re.compile(r"(?:(\d{1,4})\*)?(\d{1,4}(?:x\d{1,4})*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices of one replica, in rank order, on a mesh with a pipeline of `pipeline` ranks around it."""

    devices: tuple[int, ...]
    mesh: Mesh
    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """Replicas, the devices that play their ranks one after another, and the predicted seconds of a step."""

    portions: tuple[Portion, ...]
    devices: tuple[int, ...]
    step_s: float


def groups_of(whole: Plan, speeds: Mapping[int, float], fresh: Sequence[int] = ()) -> list[Group]:
    """The replicas of `whole` as far as their devices live; `speeds` are those of living ones, and `fresh` devices
    take the places of dead ones."""
    pipeline = 1 if whole.pipeline is None else whole.pipeline.ranks
    size, shape, names = whole.mesh.size, whole.mesh.shape, whole.mesh.axis_names
    inner, comers = size // shape[0], iter(fresh)
    found = []
    for replica in range(shape[0]):
        seats = [stage * size + replica * inner + at for stage in range(pipeline) for at in range(inner)]
        taken = [seat if seat in speeds else next(comers, None) for seat in seats]
        living = [device for device in taken if device is not None]
        kept = _fastest(living, speeds)
        if len(kept) == len(seats):
            found.append(Group(devices=tuple(kept), mesh=Mesh((1, *shape[1:]), names), pipeline=pipeline))
        elif kept:
            stages = max(1, len(kept) // inner) if whole.pipeline is not None else 1
            width = min(inner, len(kept) // stages)
            # All of what is left along the last axis.
            mesh = Mesh((1,) * (len(shape) - 1) + (width,), names) if len(shape) > 1 else Mesh((1,), names)
            found.append(Group(devices=tuple(kept[: stages * mesh.size]), mesh=mesh, pipeline=stages))
    return found


def _fastest(devices: Sequence[int], speeds: Mapping[int, float]) -> list[int]:
    """So many of them, the fastest ones, that their number by the speed of the slowest is most; in their order."""
    ordered = sorted(devices, key=lambda device: -speeds.get(device, 1.0))
    most = max(range(len(ordered)), key=lambda at: (at + 1) * speeds.get(ordered[at], 1.0), default=-1)
    return [device for device in devices if device in set(ordered[: most + 1])]


def groups_by_rule(text: str, whole: Plan, alive: Sequence[int]) -> list[Group]:
    """The replicas that a rule for meshes names, `1x2 + 1x1`, or `2*1 + 1*1` with the ranks of each pipeline."""
    found, first = [], 0
    for part in text.replace(" ", "").split("+"):
        match = _FORM.fullmatch(part)
        if (
            match is None
            or len(match[2].split("x")) != whole.mesh.ndim
            or (match[1] is None) != (whole.pipeline is None)
        ):
            form = "1x2" if whole.pipeline is None else "2*1x2"
            raise RequestError(
                f"'mesh' must name replicas by meshes with the plan's {whole.mesh.ndim} axes joined by '+', such as "
                f"{form} where there is {'no' if whole.pipeline is None else 'a'} pipeline, got {text[:60]!r}"
            )
        mesh = Mesh(tuple(int(size) for size in match[2].split("x")), whole.mesh.axis_names)
        count = mesh.size * int(match[1] or 1)
        found.append(Group(devices=tuple(alive[first : first + count]), mesh=mesh, pipeline=int(match[1] or 1)))
        first += count
    if first > len(alive):
        raise RequestError(f"'mesh' must name replicas for the {len(alive)} processes that live, got {text[:60]!r}")
    return found


def portions_for(
    whole: Plan, groups: Sequence[Group], speeds: Mapping[int, float], solved: Solved, *, time_limit_s: float
) -> Portions | None:
    """The plans of replicas on `groups` of devices; None where the search finds no plan for one of them."""
    samples = samples_of(solved.args, solved.kwargs)
    pieces = samples if whole.pipeline is None else whole.pipeline.microbatches
    rates = [len(group.devices) * min(speeds.get(device, 1.0) for device in group.devices) for group in groups]
    shares = shared_out(pieces, rates) if rates else []
    # A replica so slow that it gets nothing only adds to what has to be summed.
    working = [(group, share) for group, share in zip(groups, shares, strict=True) if share]
    rows = shared_out(samples, [share for _, share in working]) if working else []
    found, longest = [], 0.0
    for (group, share), count in zip(working, rows, strict=True):
        choice = _choice(whole, group, speeds)
        if choice is None:
            return None
        asked = whole
        if whole.pipeline is not None:
            asked = msgspec.structs.replace(whole, pipeline=msgspec.structs.replace(whole.pipeline, microbatches=share))
        try:
            made = solved.of_rows(count).find(asked, choice, time_limit_s=time_limit_s / len(working))
        except Infeasible:
            return None
        if not isinstance(made, Plan):
            return None
        made = msgspec.structs.replace(made, predicted=slowed(made, choice.speed))
        found.append(Portion(plan=made, share=share))
        longest = max(longest, made.predicted.step_time_s)
    if not found:
        return None
    devices = tuple(device for group, _ in working for device in group.devices)
    return Portions(portions=tuple(found), devices=devices, step_s=longest + _summing_s(whole, len(found)))


def _choice(whole: Plan, group: Group, speeds: Mapping[int, float]) -> Choice | None:
    """Its devices as a cluster of their own; None where its nodes have unlike numbers of them."""
    per_node = whole.cluster.devices_per_node
    counts: dict[int, int] = {}
    for device in group.devices:
        counts[device // per_node] = counts.get(device // per_node, 0) + 1
    if len(set(counts.values())) != 1:
        return None
    speed = min(speeds.get(device, 1.0) for device in group.devices)
    return Choice(devices=group.devices, mesh=group.mesh, pipeline=group.pipeline, nodes=len(counts), speed=speed)


def _summing_s(whole: Plan, replicas: int) -> float:
    """Seconds to sum the gradients of that many replicas, after the backward."""
    if replicas == 1:
        return 0.0
    size = sum(
        math.prod(tensor.shape) * dtype_bytes(tensor.dtype) * whole.copies(tensor.name) for tensor in whole.parameters
    )
    intra, nic = cluster_links(whole.cluster, load_device(whole.cluster.device))
    link = nic if whole.cluster.nodes > 1 else intra
    return 2 * (replicas - 1) * (size / replicas / link.rate_bytes_per_s + link.latency_s)

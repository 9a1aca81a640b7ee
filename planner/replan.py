"""A plan again when devices die or slow down: which of those that live work together, on which mesh, and what moves.

The model is split anew, by the same search and the same prices, on each of a few meshes of survivors: any number per
node and any number of nodes, dead and slow devices left out or kept. A step is as slow as its slowest device's
computation. Of the plans found that one is taken which does most steps until the next failure is to be expected, the
change to it included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from ..cost_models.devices import load_device
from ..cost_models.links import cluster_links
from ..plans.clusters import Cluster
from ..plans.errors import Infeasible, RequestError
from ..plans.health import Health
from ..plans.meshes import Mesh
from ..plans.migration import Migration, carried, migrate
from ..plans.plan import Plan
from ..plans.replacements import Replacement
from .api import plan as plan_anew
from .own_rules import OpRule

__all__ = ["replan"]

LossFunction = Callable[[Any], torch.Tensor]

# Meshes that are solved at most, those of most speed first.
_TRIED = 4
# Seconds, at least, for the search of one mesh.
_LEAST_S = 3.0
# What a step is not: perfectly divided. A mesh is not tried where even so it would be slower than one found.
_OPTIMISM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Devices, in rank order, on a mesh with a pipeline of `pipeline` ranks around it; `speed` of the slowest."""

    devices: tuple[int, ...]
    mesh: Mesh
    pipeline: int
    nodes: int
    speed: float

    @property
    def rate(self) -> float:
        """How fast all of them would be if the step were divided perfectly."""
        return len(self.devices) * self.speed

    @property
    def name(self) -> str:
        """The mesh in words."""
        return f"{self.pipeline} x {self.mesh}" if self.pipeline > 1 else str(self.mesh)


def replan(
    plan: Plan,
    health: Mapping[int, float] | Health,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    rules: Sequence[OpRule] = (),
    horizon_s: float | None = None,
    time_limit_s: float = 60.0,
    tries: int = _TRIED,
) -> Replacement:
    """The plan for the devices that `health` leaves, and what moves to get there.

    health      speed of each device that is not healthy, by its rank in `plan`: 0 dead .. 1 healthy
    model, ...  as for `plan`, the whole batch: it stays the same, and so does what a step computes
    horizon_s   seconds to the next failure; a plan whose switch takes longer than it gains in that time is not taken
    tries       how many meshes are solved for at most
    time_limit_s    for all of them; the search of one gets half of what is left, so a first plan is there early

    Infeasible names each mesh that was tried and why it does not do.
    """
    size = plan.mesh.size * (1 if plan.pipeline is None else plan.pipeline.ranks)
    state = Health.of(health, size)
    if horizon_s is not None and not horizon_s > 0:
        raise RequestError(f"'horizon_s' must be positive, got {horizon_s}")
    if tries < 1:
        raise RequestError(f"'tries' must be 1 or more, got {tries}")
    choices = sorted(_choices(plan, state, size), key=lambda one: (-one.rate, -len(one.devices), one.mesh.shape))
    if not choices:
        raise Infeasible(
            f"'health' must leave a device alive, got none of {size}; wait for devices or plan for another cluster"
        )
    found: list[Replacement] = []
    refused: list[str] = []
    until = time.perf_counter() + time_limit_s
    for choice in choices[:tries]:
        perfect = plan.predicted.compute_s * size / choice.rate * _OPTIMISM
        if found and perfect > min(one.step_time_s for one in found):
            break
        left = until - time.perf_counter()
        if found and left <= 0:
            break
        # Both ways to recompute may be searched for one mesh.
        share = max(_LEAST_S, left / 4)
        try:
            made = _solved(plan, choice, model, args, kwargs, loss=loss, rules=rules, time_limit_s=share)
        except Infeasible as error:
            refused.append(f"{choice.name}: {error}")
            continue
        found.append(_replacement(plan, made, choice, state, size))
    if not found:
        raise Infeasible("'health' must leave a mesh on which the model fits, got none:\n" + "\n".join(refused))
    best = min(found, key=lambda one: _cost(one, horizon_s))
    tried = tuple((_named(one.plan), one.step_time_s) for one in found)
    return msgspec.structs.replace(best, tried=tried)


def _choices(plan: Plan, health: Health, size: int) -> Iterator[_Choice]:
    """Meshes of survivors at least as fast as each of the speeds that there are."""
    per_node = plan.cluster.devices_per_node
    speeds = {device: health.speed(device) for device in range(size)}
    seen: set[tuple[int, ...]] = set()
    for least in sorted({speed for speed in speeds.values() if speed > 0}, reverse=True):
        nodes: dict[int, list[int]] = {}
        for device in range(size):
            if speeds[device] >= least:
                nodes.setdefault(device // per_node, []).append(device)
        for count in range(1, per_node + 1):
            rows = [
                sorted(sorted(row, key=lambda device: (-speeds[device], device))[:count])
                for row in nodes.values()
                if len(row) >= count
            ]
            devices = tuple(device for row in rows for device in row)
            if not devices or devices in seen:
                continue
            seen.add(devices)
            slowest = min(speeds[device] for device in devices)
            for pipeline, mesh in _meshes(plan, len(rows), count):
                yield _Choice(devices=devices, mesh=mesh, pipeline=pipeline, nodes=len(rows), speed=slowest)


def _meshes(plan: Plan, nodes: int, count: int) -> Iterator[tuple[int, Mesh]]:
    """Degrees for `nodes` times `count` devices, with the plan's own axes: the last within a node, the first over what
    is left."""
    names, total = plan.mesh.axis_names, nodes * count
    pipelines = [1] if plan.pipeline is None else sorted({plan.pipeline.ranks, plan.pipeline.ranks - 1, nodes, 1})
    for pipeline in pipelines:
        if pipeline < 1 or total % pipeline:
            continue
        rest = total // pipeline
        if len(names) == 1:
            yield pipeline, Mesh((rest,), names)
            continue
        for inner in sorted({count, plan.mesh.shape[-1]} if plan.cluster.nodes > 1 else set(_near(plan, rest))):
            middle = plan.mesh.shape[1:-1]
            outer, left = divmod(rest, inner * Mesh.of(middle).size if middle else inner)
            if not left and inner <= count and outer >= 1:
                yield pipeline, Mesh((outer, *middle, inner), names)


def _near(plan: Plan, total: int) -> list[int]:
    """Sizes of the last axis in one node: those that divide, the nearest to the plan's own and all of it."""
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    return sorted(divisors, key=lambda size: abs(size - plan.mesh.shape[-1]))[:2] + [total]


def _solved(
    plan: Plan,
    choice: _Choice,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    *,
    loss: LossFunction | None,
    rules: Sequence[OpRule],
    time_limit_s: float,
) -> Plan:
    """The plan of the same request on these devices."""
    options = plan.options
    memory = plan.cluster.memory_bytes
    cluster = Cluster(
        device=plan.cluster.device,
        nodes=choice.nodes,
        devices_per_node=len(choice.devices) // choice.nodes,
        links=plan.cluster.links,
        memory_bytes=tuple(memory[device] for device in choice.devices) if isinstance(memory, tuple) else memory,
    )
    degrees: dict[str, Any] = {}
    if plan.pipeline is not None:
        degrees = {"pipeline": choice.pipeline, "microbatches": plan.pipeline.microbatches}
    return plan_anew(
        model,
        args,
        kwargs,
        cluster=cluster,
        mesh=choice.mesh,
        loss=loss,
        constraints=options.constraints,
        recipe=options.recipe or None,
        optimizer=options.optimizer,
        compiled=options.compiled,
        recompute="auto",
        memory_limit_bytes=options.memory_limit_bytes,
        replicate=options.replicate,
        dynamic=options.dynamic or None,
        rules=rules,
        time_limit_s=time_limit_s,
        name=plan.model.name,
        **degrees,
    )


def _replacement(before: Plan, made: Plan, choice: _Choice, health: Health, size: int) -> Replacement:
    made = msgspec.structs.replace(
        made,
        model=msgspec.structs.replace(made.model, origin=before.model.origin),
        predicted=_slowed(made, choice.speed),
    )
    migration = _migration(before, made, choice.devices, health, size)
    alive = [device for device in range(size) if health.speed(device) > 0]
    return Replacement(
        plan=made,
        devices=choice.devices,
        idle=tuple(device for device in alive if device not in set(choice.devices)),
        step_time_s=made.predicted.step_time_s,
        migration=migration,
        migration_s=0.0 if migration is None else _seconds(migration, before.cluster),
        tried=(),
    )


def _slowed(plan: Plan, speed: float) -> Any:
    """What is predicted where the slowest device computes at `speed`: communication is as fast as before."""
    now = plan.predicted
    more = (now.compute_s + now.optimizer_s) * (1 / speed - 1)
    return msgspec.structs.replace(
        now,
        step_time_s=now.step_time_s + more,
        compute_s=now.compute_s / speed,
        optimizer_s=now.optimizer_s / speed,
        recompute_s=now.recompute_s / speed,
    )


def _migration(before: Plan, after: Plan, devices: tuple[int, ...], health: Health, size: int) -> Migration | None:
    """What moves; None for plans with pipelines, whose ranks hold other parts of the model."""
    if before.pipeline is not None or after.pipeline is not None:
        return None
    states = {"adamw": 2, "adam": 2, "sgd-momentum": 1}.get(before.options.optimizer, 0)
    names = ("exp_avg", "exp_avg_sq")[:states]
    per_node = before.cluster.devices_per_node
    return migrate(
        carried(before, after, range(size), devices, states=names),
        [device for device in range(size) if health.speed(device) > 0],
        apart=lambda donor, receiver: int(donor // per_node != receiver // per_node),
    )


def _seconds(migration: Migration, cluster: Cluster) -> float:
    """Seconds of the device that takes longest to send or to receive, all at once on their own links."""
    intra, nic = cluster_links(cluster, load_device(cluster.device))
    spent: dict[tuple[int, str], float] = {}
    for (donor, receiver), size in migration.between().items():
        near = donor // cluster.devices_per_node == receiver // cluster.devices_per_node
        seconds = size / (intra if near else nic).rate_bytes_per_s
        for key in ((donor, "out"), (receiver, "in")):
            spent[key] = spent.get(key, 0.0) + seconds
    return max(spent.values(), default=0.0)


def _cost(found: Replacement, horizon_s: float | None) -> tuple[float, float]:
    if horizon_s is None:
        return found.step_time_s, found.migration_s
    return -max(0.0, horizon_s - found.migration_s) / found.step_time_s, found.step_time_s


def _named(plan: Plan) -> str:
    return str(plan.mesh) if plan.pipeline is None else f"{plan.pipeline.ranks} ranks of {plan.mesh}"

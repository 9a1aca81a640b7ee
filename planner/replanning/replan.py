"""A plan again when devices die or slow down: which of those that live work together, on which mesh, and what moves.

The model is split anew, by the same search and the same prices, on each of a few meshes of survivors: any number per
node and any number of nodes, dead and slow devices left out or kept. A step is as slow as its slowest device's
computation. Of the plans found that one is taken which does most steps until the next failure is to be expected, the
change to it included. A mesh on which no plan can be faster than one found is not solved for (solved.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from ...cost_models.devices import load_device
from ...cost_models.links import cluster_links
from ...plans.clusters import Cluster
from ...plans.errors import Infeasible, RequestError
from ...plans.health import Health
from ...plans.layouts import REPLICATE
from ...plans.meshes import Mesh
from ...plans.migration import Migration, carried, migrate
from ...plans.plan import Plan, Predicted
from ...plans.replacements import Replacement
from ..arguments import check_arguments
from ..sharding.own_rules import OpRule
from .choices import Choice, Devices, choices
from .solved import Solved

__all__ = ["least_copies", "ranks_of", "replan", "replanned", "slowed"]

LossFunction = Callable[[Any], torch.Tensor]

# Meshes that are solved at most, those of most speed first.
_TRIED = 4
# Seconds, at least, for the search of one mesh.
_LEAST_S = 3.0
# What a step is not: perfectly divided. A mesh is not tried where even so it would be slower than one found.
_OPTIMISM = 0.9


def replan(
    plan: Plan,
    health: Mapping[int, float] | Health,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    rules: Sequence[OpRule] = (),
    mesh: Mesh | str | None = None,
    added: Sequence[int] = (),
    copies: int = 1,
    horizon_s: float | None = None,
    time_limit_s: float = 60.0,
    tries: int = _TRIED,
) -> Replacement:
    """The plan for the devices that `health` leaves, and what moves to get there.

    health      speed of each device that is not healthy, by its rank in `plan`: 0 dead .. 1 healthy
    model, ...  as for `plan`, the whole batch: it stays the same, and so does what a step computes
    mesh        of the new plan (of one of its pipeline ranks), where that is not to be searched for
    added       the nodes of devices that come in addition; they are numbered after those of `plan`
    copies      how many devices shall hold each piece of a parameter, where a plan is found by which they do
    horizon_s   seconds to the next failure; a plan whose switch takes longer than it gains in that time is not taken
    tries       how many meshes are solved for at most
    time_limit_s    for all of them; the search of one gets half of what is left, so a first plan is there early

    Infeasible names each mesh that was tried and why it does not do.
    """
    check_arguments(
        plan=plan, health=health, model=model, args=args, kwargs=kwargs, loss=loss, rules=rules, mesh=mesh,
        horizon_s=horizon_s, time_limit_s=time_limit_s, tries=tries,
    )  # fmt: skip
    solved = Solved(model=model, args=args, kwargs=kwargs or {}, loss=loss, rules=rules)
    return replanned(
        plan, health, solved, mesh=mesh, added=added, copies=copies, horizon_s=horizon_s, time_limit_s=time_limit_s,
        tries=tries,
    )  # fmt: skip


def replanned(
    plan: Plan,
    health: Mapping[int, float] | Health,
    solved: Solved,
    *,
    mesh: Mesh | str | None = None,
    added: Sequence[int] = (),
    copies: int = 1,
    horizon_s: float | None = None,
    time_limit_s: float = 60.0,
    tries: int = _TRIED,
) -> Replacement:
    """`replan` with what `solved` knows of the plan's model already."""
    plan.one_mesh("replanned")
    size = ranks_of(plan)
    devices = Devices.of(plan, Health.of(health, size + len(added)), added)
    if horizon_s is not None and not horizon_s > 0:
        raise RequestError(f"'horizon_s' must be positive, got {horizon_s}")
    for name, value in (("tries", tries), ("copies", copies)):
        if value < 1:
            raise RequestError(f"'{name}' must be 1 or more, got {value}")
    found: list[Replacement] = []
    refused: list[str] = []
    listed = choices(plan, devices, Mesh.parse(mesh) if isinstance(mesh, str) else mesh)
    if not listed:
        raise Infeasible(
            f"'health' must leave a device alive, got none of {size}; wait for devices or plan for another cluster"
        )
    work_s = sum(node.time_s * node.count for node in plan.nodes) * plan.mesh.size * _steps(plan)
    until = time.perf_counter() + time_limit_s
    passed: list[tuple[str, float]] = []

    def enough(one: Replacement) -> bool:
        return least_copies(one.plan) >= copies

    for choice in listed[:tries]:
        bar = min((_least_worth_s(one, horizon_s) for one in found if enough(one)), default=math.inf)
        if work_s / choice.rate * _OPTIMISM > bar:
            break
        left = until - time.perf_counter()
        if found and left <= 0:
            break
        # Both ways to recompute may be searched for one mesh.
        share = max(_LEAST_S, left / 4)
        made = solved.find(plan, choice, time_limit_s=share, better_than_s=bar)
        if isinstance(made, Plan):
            found.append(_replacement(plan, made, choice, devices))
        elif made.refused:
            refused.append(f"{choice.name}: {made.refused}")
        else:
            passed.append((choice.name, made.bound_s))
    if not found:
        raise Infeasible("'health' must leave a mesh on which the model fits, got none:\n" + "\n".join(refused))
    best = min(found, key=lambda one: (not enough(one), *_cost(one, horizon_s)))
    tried = tuple((_named(one.plan), one.step_time_s) for one in found)
    return msgspec.structs.replace(best, tried=tried, passed=tuple(passed))


def ranks_of(plan: Plan) -> int:
    """How many ranks a plan has."""
    return plan.mesh.size * (1 if plan.pipeline is None else plan.pipeline.ranks)


def least_copies(plan: Plan) -> int:
    """On how many devices of a pipeline rank the parameter lies that lies on fewest."""
    return min(
        (
            math.prod(size for part, size in zip(one.layout, plan.mesh.shape, strict=True) if part == REPLICATE)
            for one in plan.parameters
        ),
        default=plan.mesh.size,
    )


def _steps(plan: Plan) -> int:
    """How often a step runs what the plan's nodes say."""
    return 1 if plan.pipeline is None else plan.pipeline.microbatches


def _replacement(before: Plan, made: Plan, choice: Choice, devices: Devices) -> Replacement:
    made = msgspec.structs.replace(
        made,
        model=msgspec.structs.replace(made.model, origin=before.model.origin),
        predicted=slowed(made, choice.speed),
    )
    migration = _migration(before, made, choice.devices, devices)
    return Replacement(
        plan=made,
        devices=choice.devices,
        idle=tuple(device for device in devices.alive if device not in set(choice.devices)),
        step_time_s=made.predicted.step_time_s,
        migration=migration,
        migration_s=_seconds(migration, before.cluster, devices),
        tried=(),
    )


def slowed(plan: Plan, speed: float) -> Predicted:
    """What is predicted where the slowest device computes at `speed`: communication is as fast as before."""
    now = plan.predicted
    more = (now.compute_s + now.optimizer_s) * (1 / speed - 1)
    interval = now.step_time_interval_s
    return msgspec.structs.replace(
        now,
        step_time_s=now.step_time_s + more,
        step_time_interval_s=None if interval is None else (interval[0] + more, interval[1] + more),
        compute_s=now.compute_s / speed,
        optimizer_s=now.optimizer_s / speed,
        recompute_s=now.recompute_s / speed,
    )


def _migration(before: Plan, after: Plan, chosen: tuple[int, ...], devices: Devices) -> Migration:
    """What moves."""
    states = {"adamw": 2, "adam": 2, "sgd-momentum": 1}.get(before.options.optimizer, 0)
    names = ("exp_avg", "exp_avg_sq")[:states]
    return migrate(
        carried(before, after, range(ranks_of(before)), chosen, states=names),
        devices.alive,
        apart=devices.apart,
    )


def _seconds(migration: Migration, cluster: Cluster, devices: Devices) -> float:
    """Seconds of the device that takes longest to send or to receive, all at once on their own links."""
    intra, nic = cluster_links(cluster, load_device(cluster.device))
    spent: dict[tuple[int, str], float] = {}
    for (donor, receiver), size in migration.between().items():
        seconds = size / (nic if devices.apart(donor, receiver) else intra).rate_bytes_per_s
        for key in ((donor, "out"), (receiver, "in")):
            spent[key] = spent.get(key, 0.0) + seconds
    return max(spent.values(), default=0.0)


def _cost(found: Replacement, horizon_s: float | None) -> tuple[float, float]:
    if horizon_s is None:
        return found.step_time_s, found.migration_s
    return -max(0.0, horizon_s - found.migration_s) / found.step_time_s, found.step_time_s


def _least_worth_s(found: Replacement, horizon_s: float | None) -> float:
    """A step that takes longer than this, even if its switch took no time, is worth no more than `found`."""
    if horizon_s is None:
        return found.step_time_s
    left = horizon_s - found.migration_s
    return math.inf if left <= 0 else found.step_time_s * horizon_s / left


def _named(plan: Plan) -> str:
    return str(plan.mesh) if plan.pipeline is None else f"{plan.pipeline.ranks} ranks of {plan.mesh}"

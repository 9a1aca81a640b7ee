"""A job from a plan: what its blocks take by the prices of its nodes, at whatever degrees are asked for.

A plan divides a model over one mesh; a job divides it by tensor, replicas and stages. So that is an estimate: the
device seconds of each block are shared out evenly, and what the plan moves between devices is left out.
"""

from __future__ import annotations

import math

from ...cost_models.devices import load_device
from ...cost_models.links import cluster_links
from ...plans import Plan, RequestError
from ...plans.stamps import Stamp
from ...plans.words import dtype_bytes
from .job import Job

__all__ = ["job_of_plan"]

_STATES = {"adamw": 2, "adam": 2, "sgd-momentum": 1}
# The forward's share of what cannot be told apart.
_FORWARD = 1 / 3


def job_of_plan(plan: Plan, *, tensor: int, stages: int, replicas: int, microbatches: int) -> Job:
    """The plan's model as a job of `microbatches` micro-batches in all; layers are the blocks of its longest list.

    What comes before the blocks is work of the first layer, what comes after of the last. RequestError where the model
    has no repeated blocks, or the degrees do not fit the cluster.
    """
    lead, layers = _longest_list(plan)
    share = plan.mesh.size / microbatches / tensor
    forward, backward, before, after = _seconds(plan, lead, layers)
    forwards = [forward * share] * layers
    backwards = [backward * share] * layers
    forwards[0] += before * share * _FORWARD
    backwards[0] += before * share * (1 - _FORWARD)
    forwards[-1] += after * share * _FORWARD
    backwards[-1] += after * share * (1 - _FORWARD)
    own, rest = _parameter_bytes(plan, lead, layers)
    held = 2 + _STATES.get(plan.options.optimizer, 0)
    states = [float(own * held)] * layers
    states[0] += rest * held / 2
    states[-1] += rest * held / 2
    kept = plan.predicted.memory.activations_bytes * plan.mesh.size / layers / microbatches
    sheet = load_device(plan.cluster.device)
    intra, nic = cluster_links(plan.cluster, sheet)
    per_node = plan.cluster.devices_per_node
    room = plan.options.memory_limit_bytes or plan.cluster.least_memory_bytes(plan.cluster.size)
    return Job(
        forward_s=tuple(forwards),
        backward_s=tuple(backwards),
        tensor=tensor,
        stages=stages,
        replicas=replicas,
        microbatches=microbatches,
        devices=plan.cluster.size,
        devices_per_node=per_node,
        degrees=tuple(range(1, per_node + 1)),
        state_bytes=tuple(states),
        gradient_bytes=tuple(one / held for one in states),
        activation_bytes=(kept,) * layers,
        memory_bytes=float(room or sheet.memory_bytes - sheet.framework_constant_bytes),
        intra_bytes_per_s=intra.rate_bytes_per_s,
        inter_bytes_per_s=nic.rate_bytes_per_s,
        delay_s=nic.latency_s,
    )


def _longest_list(plan: Plan) -> tuple[str, int]:
    """What names of the blocks of the longest list begin with, and how many blocks it has."""
    stamps = [Stamp.parse(block.pattern, block.count) for block in plan.model.blocks]
    counts: dict[str, int] = {}
    for stamp in stamps:
        if stamp is not None:
            lead = f"{stamp.path}." if stamp.path else ""
            counts[lead] = counts.get(lead, 0) + len(stamp.numbers)
    if not counts:
        raise RequestError(f"'plan' must be of a model with repeated blocks, got {plan.model.name} without")
    lead = max(sorted(counts), key=lambda one: counts[one])
    # Blocks that are like no other go by their own number.
    own = {node.name[len(lead) :].split(".")[0].split(":")[0] for node in plan.nodes if node.name.startswith(lead)}
    return lead, counts[lead] + sum(mark.isdecimal() for mark in own)


def _inside(name: str, lead: str) -> bool:
    """Whether a name lies in a block of the list."""
    return name.startswith(lead) and name[len(lead) :][:1] in set("*0123456789")


def _seconds(plan: Plan, lead: str, layers: int) -> tuple[float, float, float, float]:
    """Of a mean block forward and backward, and of what comes before the blocks and after them.

    Nodes are in the order in which they run: a block's forward is before the first node of what follows the blocks."""
    inside = [_inside(node.name, lead) for node in plan.nodes]
    first = inside.index(True) if True in inside else len(inside)
    turn = next((i for i in range(first, len(inside)) if not inside[i] and plan.nodes[i].time_s > 0), len(inside))
    sums = [0.0, 0.0, 0.0, 0.0]
    for index, node in enumerate(plan.nodes):
        part = (0 if index < turn else 1) if inside[index] else 2 if index < first else 3
        sums[part] += node.time_s * node.count
    forward, backward = sums[0] / layers, sums[1] / layers
    if not (forward > 0 and backward > 0):
        # A forward alone, or an order that does not tell: by the usual share.
        forward, backward = (forward + backward) * _FORWARD, (forward + backward) * (1 - _FORWARD)
    if not forward > 0:
        raise RequestError(f"'plan' must price the ops of {lead}*, got none that takes time")
    return forward, backward, sums[2], sums[3]


def _parameter_bytes(plan: Plan, lead: str, layers: int) -> tuple[float, int]:
    """Bytes of the parameters of a mean block, and of all that are in none."""
    own = rest = 0
    for tensor in plan.parameters:
        size = math.prod(tensor.shape) * dtype_bytes(tensor.dtype) * plan.copies(tensor.name)
        if _inside(tensor.name, lead):
            own += size
        else:
            rest += size
    return own / layers, rest

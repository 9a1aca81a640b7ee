"""Times of collectives: a start, hops along a ring or tree, and the buffer over the slowest level of links.

    seconds = start + hops + x + sqrt(x * ramp_s),   x = share of the buffer that crosses / bandwidth reached

`size_bytes` is always the whole tensor of one group: what all_gather returns, what reduce_scatter and all_reduce take
on each device, the message of broadcast and point_to_point, and for all_to_all the tensor that is spread over the group
(each device holds 1/group_size of it, before and after). For the last the time can fall as the group grows; the others
never do.

Levels: devices of one node in a ring over `intra`, nodes in a ring over `inter` with one wire per member, both busy at
once, as in NCCL's rings (4 nodes of 8 H200 and B200: within 10 % above 64 MiB). Where a switch reduces (NVLink SHARP),
all_reduce takes the faster way. Sources: the device's sheet.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import numpy as np

from ..plans.errors import RequestError
from .devices import DeviceLink
from .kernels import Numbers, Times
from .links import AxisLink

__all__ = ["ALGORITHMS", "KINDS", "axis_collective_s", "collective_s"]

ALGORITHMS = ("ring", "tree", "switch")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "point_to_point")

_Size: TypeAlias = Any  # a float, or a float64 array: numbers alone are priced without numpy, ten times as fast

_RING_HOP = 2.0  # a ring step waits for its data and for its buffer: 8, 17 and 31 us on 2, 4 and 8 H100
_TREE_HOP = 2.5  # a tree step serves two children
_PEER_HOP = 0.125  # one more peer in an all_to_all, whose sends overlap: 37, 42, 98 us on 16, 32, 128 H100


def collective_s(kind: str, size_bytes: Numbers, *, group_size: int, link: DeviceLink) -> Times:
    """Seconds of one collective among `group_size` devices joined by one level of wires; 0 for a group of one."""
    return axis_collective_s(kind, size_bytes, AxisLink(group_size=group_size, nodes=1, intra=link, inter=link))


def axis_collective_s(kind: str, size_bytes: Numbers, axis: AxisLink, *, algorithm: str | None = None) -> Times:
    """Seconds of one collective that all groups along a mesh axis run at the same time; 0 for groups of one.

    `algorithm` fixes that of an all_reduce ('ring', 'tree' or 'switch'), by default the fastest that the links have.
    """
    if algorithm is not None and (kind != "all_reduce" or algorithm not in _algorithms(axis)):
        known = ", ".join(_algorithms(axis)) if kind == "all_reduce" else "None"
        raise RequestError(f"'algorithm' must be {known} for {kind} here, got {algorithm!r}; leave it out")
    if kind not in KINDS:
        raise RequestError(f"'kind' must be one of {', '.join(KINDS)}, got {kind!r}; name the collective so")
    alone = isinstance(size_bytes, int | float) or np.ndim(size_bytes) == 0
    size = float(size_bytes) if alone else np.asarray(size_bytes, np.float64)
    if axis.group_size == 1:
        return size * 0.0
    if kind == "all_reduce":
        ways = _algorithms(axis) if algorithm is None else (algorithm,)
        seconds = functools.reduce(_smaller, (_all_reduce_s(size, axis, way) for way in ways))
    elif kind == "all_to_all":
        seconds = _all_to_all_s(size, axis)
    elif kind == "broadcast":
        seconds = _seconds(_tree_latency_s(axis), _busy_s(size, axis), axis)
    elif kind == "point_to_point":
        seconds = _point_to_point_s(size, axis)
    else:
        share = (axis.group_size - 1) / axis.group_size
        seconds = _seconds(_ring_latency_s(axis), _busy_s(size * share, axis), axis)
    if axis.nodes == 1 and axis.intra.slowdowns:
        seconds = seconds * dict(axis.intra.slowdowns).get(kind, 1.0)
    if isinstance(size, float):
        return seconds if size > 0 else 0.0
    return np.where(size > 0, seconds, 0.0)


def _algorithms(axis: AxisLink) -> tuple[str, ...]:
    """The ways in which the links can reduce: a switch only inside a node and only for three devices and more."""
    if axis.nodes == 1 and axis.group_size > 2 and axis.intra.switch_reduce_efficiency > 0:
        return ALGORITHMS
    return ALGORITHMS[:2]


def _all_reduce_s(size: _Size, axis: AxisLink, algorithm: str) -> _Size:
    """A ring, a double binary tree (few hops, no saving of 1/n) or, inside a node, the switch."""
    if algorithm == "ring":
        share = 2.0 * (axis.group_size - 1) / axis.group_size
        return _seconds(_ring_latency_s(axis), _busy_s(size * share, axis), axis)
    if algorithm == "tree":
        return _seconds(_tree_latency_s(axis), _busy_s(size * 2.0, axis), axis)
    rate = axis.intra.bandwidth_bytes_per_s / axis.intra.devices_per_link * axis.intra.switch_reduce_efficiency
    return _seconds(_tree_latency_s(axis), size / rate, axis)


def _all_to_all_s(size: _Size, axis: AxisLink) -> _Size:
    """Every device sends 1/n of what it holds to every other: inside its node over `intra`, else over its own wire."""
    n, held = axis.group_size, size / axis.group_size
    inside = held * (axis.members_per_node - 1) / n / axis.intra.rate_bytes_per_s
    outside = held * (n - axis.members_per_node) / n / axis.inter.rate_bytes_per_s
    level = axis.inter if axis.nodes > 1 else axis.intra
    if axis.tiers:
        outside = outside * max(1.0, *(tier.exchange_load(n, axis.members_per_node) for tier in axis.tiers))
    latency = level.base_latency_s + level.latency_s * (4.0 + _PEER_HOP * (n - 1))
    latency += sum(tier.latency_s for tier in axis.tiers)
    return _seconds(latency, _larger(inside, outside), axis)


def _point_to_point_s(size: _Size, axis: AxisLink) -> _Size:
    """The slowest pair of neighbours along the axis."""
    level = axis.inter if axis.nodes > 1 else axis.intra
    latency = level.base_latency_s + level.latency_s + sum(tier.latency_s for tier in axis.tiers)
    return _seconds(latency, size / level.rate_bytes_per_s * _up_load(axis), axis)


def _busy_s(volume: _Size, axis: AxisLink) -> _Size:
    """Seconds the slowest level is busy when `volume` bytes pass every device; one wire per member joins nodes."""
    inside = volume / axis.intra.rate_bytes_per_s if axis.members_per_node > 1 else volume * 0.0
    outside = volume / (axis.inter.rate_bytes_per_s * axis.members_per_node) if axis.nodes > 1 else volume * 0.0
    return _larger(inside, outside * _up_load(axis))


def _up_load(axis: AxisLink) -> float:
    """How much longer the busiest level above the nodes takes than their ports, in rings, trees and between pairs."""
    return max(1.0, *(tier.ring_load for tier in axis.tiers)) if axis.tiers else 1.0


def _seconds(latency_s: float, busy: _Size, axis: AxisLink) -> _Size:
    ramp_s = (axis.intra if axis.nodes == 1 else axis.inter).ramp_s
    return latency_s + busy + (busy * ramp_s) ** 0.5


def _levels(axis: AxisLink) -> tuple[DeviceLink, ...]:
    """The links that the groups really use."""
    if axis.nodes == 1:
        return (axis.intra,)
    return (axis.intra, axis.inter) if axis.members_per_node > 1 else (axis.inter,)


def _ring_latency_s(axis: AxisLink) -> float:
    base = max(level.base_latency_s for level in _levels(axis))
    inside = (axis.members_per_node - 1) * axis.intra.latency_s
    above = sum((tier.spans - 1) * tier.latency_s for tier in axis.tiers)
    return base + _RING_HOP * (inside + (axis.nodes - 1) * axis.inter.latency_s + above)


def _tree_latency_s(axis: AxisLink) -> float:
    base = max(level.base_latency_s for level in _levels(axis))
    inside = math.ceil(math.log2(axis.members_per_node)) * axis.intra.latency_s
    above = sum(math.ceil(math.log2(tier.spans)) * tier.latency_s for tier in axis.tiers)
    return base + 2.0 * _TREE_HOP * (inside + math.ceil(math.log2(axis.nodes)) * axis.inter.latency_s + above)


def _larger(first: _Size, second: _Size) -> _Size:
    return max(first, second) if isinstance(first, float) else np.maximum(first, second)


def _smaller(first: _Size, second: _Size) -> _Size:
    return min(first, second) if isinstance(first, float) else np.minimum(first, second)

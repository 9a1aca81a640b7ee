"""Machines by the names that published tables give them, read strictly from `systems.toml`.

A system is a device's sheet, the size of a node, and where known a network other than the sheet's. Nodes whose devices
are wired in pairs (xGMI) reach rates that depend on the wires a group owns (`Wires`, by group size). They are not
monotone: a ring of four dies crosses a single link where a ring of sixteen has four.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..plans.errors import RequestError
from .devices import Device, DeviceLink, load_device
from .links import AxisLink, torus_link

__all__ = ["GroupWires", "System", "Wires", "find_system", "load_systems", "wired_collective_s"]

_KEYS = {"name", "match", "device", "devices_per_node", "source"}
_OPTIONAL = {"nic", "intra_link", "wires", "clock_share", "memory_bytes", "memory_bandwidth_bytes_per_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWires:
    """What a group of `members` devices of one node reaches: bytes/s of its rings, of one sender to its peers; start.

    `ramp_s` as in DeviceLink, for all_reduce alone: copies hide it in the others.
    """

    members: int
    ring_bytes_per_s: float
    start_s: float
    peer_bytes_per_s: float
    ramp_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Rates by group size, and what collectives over lists of tensors add: a copy of the whole, a start per member."""

    groups: tuple[GroupWires, ...]
    staging_bytes_per_s: float
    list_start_s: tuple[tuple[str, float], ...]
    list_member_s: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A machine: `devices_per_node` devices joined by the sheet's inner link, nodes joined by `nic`."""

    name: str
    match: tuple[str, ...]
    device: Device
    devices_per_node: int
    nic: DeviceLink
    wires: Wires | None
    source: str

    def axis(self, group_size: int, nodes: int) -> AxisLink:
        """The links of a group that lies evenly on `nodes` nodes."""
        members = max(1, group_size // nodes)
        intra = self.device.intra_link
        if intra.torus_dims:
            intra = torus_link(intra, members, members, 1)
        return AxisLink(group_size=group_size, nodes=nodes, members_per_node=members, intra=intra, inter=self.nic)


def load_systems(text: str | None = None) -> tuple[System, ...]:
    """The systems in `text`, or the shipped ones; RequestError names the entry and key that is wrong."""
    if text is None:
        folder = resources.files(__package__ or "meshwright.cost_models")
        text = (folder / "systems.toml").read_text(encoding="utf-8")
    return tuple(_system(entry) for entry in tomllib.loads(text)["system"])


def find_system(systems: tuple[System, ...], text: str) -> System | None:
    """The first system that `text` names, or None."""
    for system in systems:
        if any(re.search(pattern, text, re.IGNORECASE) for pattern in system.match):
            return system
    return None


def wired_collective_s(kind: str, size_bytes: float, group_size: int, wires: Wires) -> float | None:
    """Seconds of a collective inside a node of paired wires; None where that group or kind was not measured."""
    group = next((g for g in wires.groups if g.members == group_size), None)
    starts, members = dict(wires.list_start_s), dict(wires.list_member_s)
    share = (group_size - 1) / group_size
    if group is None or (kind != "all_reduce" and kind not in starts):
        return None
    if kind == "all_reduce":
        busy = 2.0 * share * size_bytes / group.ring_bytes_per_s
        return group.start_s + busy + math.sqrt(busy * group.ramp_s)
    start_s = group.start_s + starts[kind] + members[kind] * group_size
    if kind == "all_to_all":
        return start_s + share * size_bytes / group_size / group.peer_bytes_per_s
    return start_s + share * size_bytes / group.ring_bytes_per_s + size_bytes / wires.staging_bytes_per_s


def _system(entry: Mapping[str, Any]) -> System:
    if not set(entry) >= _KEYS or set(entry) - _KEYS - _OPTIONAL:
        raise RequestError(f"'system' must have {sorted(_KEYS)} and may have {sorted(_OPTIONAL)}, got {sorted(entry)}; "
                           "correct systems.toml")  # fmt: skip
    device = load_device(entry["device"])
    device = _variant(device, entry)
    nic = dataclasses.replace(device.nic, **entry.get("nic", {}), source=entry["source"])
    wires = entry.get("wires")
    return System(
        name=entry["name"],
        match=tuple(entry["match"]),
        device=device,
        devices_per_node=entry["devices_per_node"],
        nic=nic,
        wires=None if wires is None else _wires(wires),
        source=entry["source"],
    )


def _variant(device: Device, entry: Mapping[str, Any]) -> Device:
    """The sheet's device with another memory or inner link, or at a lower clock under its power limit."""
    share = entry.get("clock_share", 1.0)
    intra = dataclasses.replace(device.intra_link, **entry.get("intra_link", {}))
    return dataclasses.replace(
        device,
        intra_link=intra,
        peaks_flops_per_s=tuple((name, peak * share) for name, peak in device.peaks_flops_per_s),
        memory_bytes=entry.get("memory_bytes", device.memory_bytes),
        memory_bandwidth_bytes_per_s=entry.get("memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s),
    )


def _wires(table: Mapping[str, Any]) -> Wires:
    return Wires(
        groups=tuple(GroupWires(**group) for group in table["groups"]),
        staging_bytes_per_s=table["staging_bytes_per_s"],
        list_start_s=tuple(table["list_start_s"].items()),
        list_member_s=tuple(table["list_member_s"].items()),
    )

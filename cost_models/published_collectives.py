"""Published collective rows: columns collective, system, n_gpus, n_nodes, payload_bytes and a time or bandwidth.

A payload is the whole tensor of one group (as in `collectives`). algbw is payload / time, busbw that times the share of
the payload that crosses each device's wire. Where n_gpus is blank but both are given, their ratio says it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from .collectives import axis_collective_s
from .repricing import Priced, Refused, positive, source_name, whole
from .systems import System, find_system, wired_collective_s

__all__ = ["COLUMNS", "price_collective"]

COLUMNS = frozenset({"collective", "system"})

_ASYMPTOTE_BYTES = 16 * 2**30  # a row with a bandwidth and no payload speaks of large messages
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorout": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallsingle": "all_to_all",
    "broadcast": "broadcast",
    "bcast": "broadcast",
    "p2p": "point_to_point",
    "p2punidir": "point_to_point",
    "pointtopoint": "point_to_point",
    "sendrecv": "point_to_point",
}


def price_collective(number: int, row: Mapping[str, str], systems: tuple[System, ...]) -> Priced | Refused:
    """The row priced on its system, or what it does not say."""
    named = row["system"]
    if "not named" in named.lower():
        return Refused(row=number, reason="the device is not named")
    system, kind = find_system(systems, named), _KINDS.get(_plain(row["collective"]))
    if system is None:
        return Refused(row=number, reason=f"no device sheet for {named!r}")
    if kind is None:
        return Refused(row=number, reason=f"no price for the collective {row['collective']!r}")
    devices = _devices(row, kind)
    if devices is None or not 2 <= devices <= 2**20:
        return Refused(row=number, reason="it says neither n_gpus (2 to 2**20) nor both bandwidths")
    size = positive(row.get("payload_bytes"))
    published = _published_s(row, kind, devices, size or _ASYMPTOTE_BYTES)
    if published is None:
        return Refused(row=number, reason="it must say a payload and a time, latency or bandwidth")
    nodes = whole(row.get("n_nodes")) or math.ceil(devices / system.devices_per_node)
    if nodes * system.devices_per_node < devices:
        return Refused(row=number, reason=f"{devices} devices do not fit on {nodes} nodes of {system.devices_per_node}")
    predicted = _predicted_s(system, kind, size or _ASYMPTOTE_BYTES, devices, nodes, named)
    if predicted is None:
        return Refused(row=number, reason=f"the wires of {system.name} were not measured for {kind} over {devices}")
    size_kind = "" if size is None or size >= 2**16 else " below 64 KiB"
    return Priced(
        row=number, source=source_name(row), model=f"{kind} over {devices}", device=system.name,
        kind=kind + (size_kind or (" bandwidth" if size is None else "")), evidence=row.get("evidence", "measured"),
        published_s=published, predicted_s=predicted, group=(named, kind, devices),
    )  # fmt: skip


def _plain(name: str) -> str:
    """A collective's name without what tools put around it."""
    return re.sub(r"(_perf|_bench)$|[-_ ]", "", re.sub(r"^(nccl|rccl|c10d)[-_.: ]+", "", name.strip().lower()))


def _predicted_s(system: System, kind: str, size: float, devices: int, nodes: int, named: str) -> float | None:
    if system.wires is not None and nodes == 1:
        return wired_collective_s(kind, size, devices, system.wires)
    algorithm = None
    if kind == "all_reduce" and nodes == 1 and system.device.intra_link.switch_reduce_efficiency > 0:
        algorithm = "ring" if re.search(r"nvls off|ring", named, re.IGNORECASE) else None
    return float(axis_collective_s(kind, size, system.axis(devices, nodes), algorithm=algorithm))


def _crossing(kind: str, devices: int) -> float:
    """busbw / algbw."""
    share = (devices - 1) / devices
    return {"all_reduce": 2.0 * share, "broadcast": 1.0, "point_to_point": 1.0}.get(kind, share)


def _devices(row: Mapping[str, str], kind: str) -> int | None:
    if row.get("n_gpus", "").strip():
        return whole(row["n_gpus"])
    alg, bus = positive(row.get("algbw_GBps", "")), positive(row.get("busbw_GBps", ""))
    if alg is None or bus is None or kind != "all_reduce" or not 1 < bus / alg < 2:
        return None
    return 2 ** round(math.log2(2.0 / (2.0 - bus / alg)))


def _published_s(row: Mapping[str, str], kind: str, devices: int, size: float) -> float | None:
    time, bus, alg = (positive(row.get(key, "")) for key in ("time_us", "busbw_GBps", "algbw_GBps"))
    if time is not None:
        return time * 1e-6
    if positive(row.get("time_ms")) is not None:
        return (positive(row["time_ms"]) or 0.0) * 1e-3
    if alg is not None and alg >= 1:
        return size / (alg * 1e9)
    if bus is not None:
        return size * _crossing(kind, devices) / (bus * 1e9)
    return None

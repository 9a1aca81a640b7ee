"""Published rates and costs, read from `rates.toml`, and the events that they make."""

from __future__ import annotations

import heapq
import math
import random
import tomllib
from dataclasses import dataclass
from importlib import resources

from ...plans import RequestError
from ..resilience import Job

__all__ = ["Costs", "Event", "Rates", "events_of"]

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that going on takes; see rates.toml."""

    restart_s: float
    regroup_s: float
    detect_s: float
    repair_s: float
    checkpoint_s: float
    storage_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How often things fail. Shares of causes sum to 1; slow-downs are those of single devices."""

    name: str
    source: str
    failures_per_node_s: float
    device_share: float
    node_share: float
    slow_per_node_s: float
    slow_s: float
    slow_speeds: tuple[float, float]
    costs: Costs

    @classmethod
    def load(cls, name: str, *, slow: bool = True) -> Rates:
        """The rates called `name` in rates.toml; without slow-downs where `slow` is False."""
        package = __package__ or "meshwright.planner.lifetime"
        tables = tomllib.loads((resources.files(package) / "rates.toml").read_text(encoding="utf-8"))
        known = [key for key, table in tables.items() if "failures_per_1000_node_days" in table]
        if name not in known:
            raise RequestError(f"'--rates' must be one of {', '.join(known)}, got {name[:60]!r}")
        table, slowed, costs = tables[name], tables["slow"], dict(tables["costs"])
        costs.pop("source")
        causes = table["device_causes"] + table["node_causes"] + table["job_causes"]
        return cls(
            name=name,
            source=table["source"],
            failures_per_node_s=table["failures_per_1000_node_days"] / 1000 / _DAY_S,
            device_share=table["device_causes"] / causes,
            node_share=table["node_causes"] / causes,
            slow_per_node_s=slowed["per_1000_node_days"] / 1000 / _DAY_S if slow else 0.0,
            slow_s=slowed["mean_s"],
            slow_speeds=(slowed["least_speed"], slowed["most_speed"]),
            costs=Costs(**costs),
        )

    def mean_between_failures_s(self, nodes: int) -> float:
        """Seconds between failures of a job on so many nodes: 1 / (nodes * rate)."""
        return math.inf if not self.failures_per_node_s else 1 / (nodes * self.failures_per_node_s)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Event:
    """Something happens to devices: dead (speed 0), slow, or only the job stops (no devices). It lasts `lasts_s`."""

    at_s: float
    devices: tuple[int, ...]
    speed: float
    lasts_s: float


def events_of(job: Job, rates: Rates, span_s: float, seed: int) -> list[Event]:
    """All events of `span_s` seconds, in order. The same for every policy that lives through them."""
    rng = random.Random(seed)
    nodes = -(-job.devices // job.devices_per_node)
    heap: list[Event] = []
    at = 0.0
    while rates.failures_per_node_s and (at := at + rng.expovariate(nodes * rates.failures_per_node_s)) < span_s:
        node, cause = rng.randrange(nodes), rng.random()
        members = range(node * job.devices_per_node, min((node + 1) * job.devices_per_node, job.devices))
        lasts = rng.expovariate(1 / rates.costs.repair_s)
        if cause < rates.device_share:
            heapq.heappush(heap, Event(at_s=at, devices=(rng.choice(members),), speed=0.0, lasts_s=lasts))
        elif cause < rates.device_share + rates.node_share:
            heapq.heappush(heap, Event(at_s=at, devices=tuple(members), speed=0.0, lasts_s=lasts))
        else:
            heapq.heappush(heap, Event(at_s=at, devices=(), speed=0.0, lasts_s=0.0))
    at = 0.0
    while rates.slow_per_node_s and (at := at + rng.expovariate(nodes * rates.slow_per_node_s)) < span_s:
        device, speed = rng.randrange(job.devices), round(rng.uniform(*rates.slow_speeds), 1)
        lasts = rng.expovariate(1 / rates.slow_s)
        heapq.heappush(heap, Event(at_s=at, devices=(device,), speed=speed, lasts_s=lasts))
    return sorted(heap)

"""Networks above the nodes: which levels of switches a group crosses, and how much less they carry.

All groups along an axis are at work together. In a ring or tree a group crosses the way up of a switch once where its
`nodes_inside` nodes there cross their own ports once each, so that way is `oversubscription / nodes_inside` as busy as
the ports. An all-to-all sends over it what goes to peers outside.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..plans.clusters import Cluster, Level
from ..plans.errors import RequestError

__all__ = ["Tier", "fabric_levels", "fabric_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One level as one group sees it: it lies under `spans` switches, with `members_inside` of its members on
    `nodes_inside` nodes under each."""

    name: str
    oversubscription: float
    latency_s: float
    spans: int
    nodes_inside: int
    members_inside: int
    source: str

    @property
    def ring_load(self) -> float:
        """How busy the way up is in a ring or tree, against the nodes' own ports."""
        return self.oversubscription / self.nodes_inside

    def exchange_load(self, group_size: int, members_per_node: int) -> float:
        """The same in an all-to-all: of what leaves a node, the share that leaves the switch."""
        leaves = (group_size - self.members_inside) / (group_size - members_per_node)
        return leaves * self.oversubscription


def fabric_levels(cluster: Cluster) -> tuple[tuple[Level, ...], str]:
    """The levels above the nodes of `cluster`, and where they are from; RequestError for a fabric that is not known."""
    fabric = cluster.fabric
    if fabric is None:
        return (), ""
    if not isinstance(fabric, str):
        return fabric, "the cluster's fabric"
    table = _table()
    if fabric not in table:
        near = ", ".join(difflib.get_close_matches(fabric, table, n=3, cutoff=0.3) or table)
        raise RequestError(f"'fabric' must be a known one or levels, got {fabric[:60]!r}; near names: {near}")
    entry = table[fabric]
    return tuple(Level(**level) for level in entry["levels"]), entry["source"]


def fabric_names() -> tuple[str, ...]:
    """The fabrics that a cluster may name."""
    return tuple(_table())


def _table() -> Mapping[str, Any]:
    folder = resources.files(__package__ or "meshwright.cost_models")
    table = tomllib.loads((folder / "fabrics.toml").read_text(encoding="utf-8"))
    return {entry["name"]: entry for entry in table["fabric"]}

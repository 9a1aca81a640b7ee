"""Replicas of unlike sizes: each runs the whole model by a plan of its own, on its share of every batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from .errors import RequestError
from .plan import Plan

__all__ = ["Portion", "Uneven", "read_plan", "shared_out"]


class Portion(Struct, frozen=True, kw_only=True):
    """One replica: its plan, on a mesh or pipeline of its own, and how many of the shares of a batch are its."""

    plan: Plan
    share: int

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return self.plan.mesh.size * (1 if self.plan.pipeline is None else self.plan.pipeline.ranks)


class Uneven(Struct, frozen=True, kw_only=True, tag_field="kind", tag="uneven"):
    """Replicas one after another over the ranks. `whole` is the plan of equal replicas that they come from, `played`
    who played its ranks: the next change is planned from there."""

    whole: Plan
    played: tuple[int, ...]
    portions: tuple[Portion, ...]

    def to_bytes(self) -> bytes:
        """What `read_plan` reads."""
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """A sha256 by which ranks see that they mean the same."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def split(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """`ranks`, one for each rank of all replicas, replica by replica."""
        found, first = [], 0
        for portion in self.portions:
            found.append(tuple(ranks[first : first + portion.ranks]))
            first += portion.ranks
        return found

    def portion_of(self, rank: int) -> int:
        """The number of the replica that a rank is in."""
        rows = self.split(range(sum(portion.ranks for portion in self.portions)))
        return next(index for index, row in enumerate(rows) if rank in row)

    def samples(self, batch: int) -> list[int]:
        """How many of `batch` samples each replica takes: the first ones the first of them."""
        return shared_out(batch, [portion.share for portion in self.portions])

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of the longest replica."""
        return max(portion.plan.predicted.step_time_s for portion in self.portions)

    @property
    def words(self) -> str:
        """The replicas' meshes and shares."""
        return " + ".join(
            f"{'' if one.plan.pipeline is None else f'{one.plan.pipeline.ranks}*'}{one.plan.mesh} ({one.share})"
            for one in self.portions
        )


def shared_out(total: int, rates: Sequence[float]) -> list[int]:
    """`total` equal pieces of work over replicas of these rates, so that the last one ends as early as can be."""
    if not rates or min(rates) <= 0:
        raise RequestError(f"'rates' must be above 0, got {tuple(rates)}")
    found = [int(total * rate // sum(rates)) for rate in rates]
    while sum(found) < total:
        found[min(range(len(rates)), key=lambda at: ((found[at] + 1) / rates[at], at))] += 1
    return found


def read_plan(data: bytes) -> Plan | Uneven:
    """A plan's file, or what `Uneven.to_bytes` gave."""
    if data.startswith(b'{"kind":"uneven"'):
        return msgspec.json.decode(data, type=Uneven)
    return Plan.from_bytes(data)

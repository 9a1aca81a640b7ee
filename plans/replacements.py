"""A plan that takes over from another when devices fail or slow down, and what the change moves."""

from __future__ import annotations

from msgspec import Struct

from .migration import Migration
from .plan import Plan
from .words import bytes_words, seconds_words

__all__ = ["Replacement"]


class Replacement(Struct, frozen=True, kw_only=True):
    """`plan` runs on `devices`: its rank r is device devices[r] of the plan before.

    idle          devices that live and are left out, because with them the step would be longer or does not divide
    step_time_s   predicted on these devices, as slow as they are
    migration     which bytes move between devices, by their numbers before
    migration_s   predicted on the cluster's links; what no living device holds (migration.missing) is not in it
    tried         meshes that were solved, and the seconds of their step
    passed        meshes that were not, because no plan on them takes less than so many seconds
    """

    plan: Plan
    devices: tuple[int, ...]
    idle: tuple[int, ...]
    step_time_s: float
    migration: Migration
    migration_s: float
    tried: tuple[tuple[str, float], ...]
    passed: tuple[tuple[str, float], ...] = ()

    @property
    def migration_bytes(self) -> int:
        """Bytes that move from one device to another."""
        return self.migration.moved_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes that no living device holds: a checkpoint must."""
        return self.migration.missing_bytes

    def __str__(self) -> str:
        lines = [
            f"mesh            {self.plan.mesh} on {len(self.devices)} devices"
            + ("" if self.plan.pipeline is None else f", {self.plan.pipeline.ranks} pipeline ranks of that mesh")
            + (f"; {len(self.idle)} that live are left out: {_listed(self.idle)}" if self.idle else ""),
            f"predicted step  {seconds_words(self.step_time_s)}",
            f"to move         {bytes_words(self.migration_bytes)} in {seconds_words(self.migration_s)}",
        ]
        if self.missing_bytes:
            lines.append(f"from checkpoint {bytes_words(self.missing_bytes)} that no living device holds")
        lines.append("tried           " + ", ".join(f"{mesh} ({seconds_words(s)})" for mesh, s in self.tried))
        if self.passed:
            least = ", ".join(f"{mesh} ({seconds_words(s)} at least)" for mesh, s in self.passed)
            lines.append(f"not solved      {least}")
        return "\n".join(lines)


def _listed(devices: tuple[int, ...]) -> str:
    return ", ".join(map(str, devices[:8])) + (", ..." if len(devices) > 8 else "")

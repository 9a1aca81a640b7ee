"""Solved plans on disk, by content: an entry is found by the very problem that it solves, and checked against it.

The key is a digest of all numbers and layouts of the problem (which follow from the captured graph, the cluster, its
prices, the mesh, the options and the constraints), of how it is asked to be solved, and of the versions of this package
and of torch. An entry that is damaged, or that does not solve the problem as it says, is ignored with a notice."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct

from ..plans import plan_file
from ..plans.errors import PlanError, RequestError
from ..plans.plan import Plan
from ..plans.version import VERSION
from .sharding.recall import recall
from .solver.problem import Solution, Stats, evaluate
from .solver.ways import Moved, Way

if TYPE_CHECKING:
    from .api import Draft

__all__ = ["Cache", "choices_from"]

_log = logging.getLogger("meshwright")
_TIE = 1e-9


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of the cache holds."""

    key: str
    choices: tuple[Annotated[int, Meta(ge=0)], ...]
    objective_s: float
    bound_s: float
    gap: Annotated[float, Meta(ge=0.0)]
    free_s: float | None = None


class Cache:
    """A folder of solved problems; made when the first one is kept. Several processes may share it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def find(self, key: str, prepared: Draft) -> Solution | None:
        """The kept solution of the problem of `prepared`, whose key is `key`."""
        path = self._path(key)
        if not os.path.exists(path):
            return None
        try:
            entry = msgspec.json.decode(plan_file.read(path), type=_Entry)
        except (PlanError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            return self._ignore(path, str(error)[:200])
        if entry.key != key or not _solves(entry, prepared):
            return self._ignore(path, "it does not solve the problem that it is named after")
        return Solution(
            choices=entry.choices,
            objective_s=entry.objective_s,
            bound_s=entry.bound_s,
            gap=entry.gap,
            status="optimal",
            seconds=0.0,
            stats=Stats(),
            free_s=entry.free_s,
        )

    def keep(self, key: str, solution: Solution) -> None:
        """Keep a solution, all of it or nothing, if it is as good as was asked for."""
        if solution.status != "optimal":
            return
        entry = _Entry(
            key=key,
            choices=tuple(map(int, solution.choices)),
            objective_s=solution.objective_s,
            bound_s=solution.bound_s,
            gap=solution.gap,
            free_s=solution.free_s,
        )
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"'cache' must be a folder that can be written, got {self.folder[:200]!r} ({error.strerror}); "
                "give another one, or none"
            ) from None
        plan_file.write(self._path(key), msgspec.json.encode(entry))

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, f"{key}.json")

    def _ignore(self, path: str, why: str) -> None:
        _log.warning("cache entry %s is ignored, and will be written anew: %s", path, why)

    @staticmethod
    def key(prepared: Draft, *, gap: float, solver: str) -> str:
        """The digest of everything that decides which solution is found."""
        digest = hashlib.sha256()
        formulation, timeline = prepared.formulation, prepared.timeline
        head = (VERSION, str(torch.__version__), solver, gap, prepared.limit, str(formulation.mesh), prepared.name)
        digest.update(repr((*head, msgspec.json.encode(prepared.options), prepared.model().digest)).encode())
        for decision in formulation.decisions:
            shown = [(s.outs, s.ins, s.local) for s in decision.strategies]
            digest.update(repr((decision.kind, decision.pattern, decision.weight, shown)).encode())
        for costs in formulation.problem.nodes:
            digest.update(_bytes(costs))
        for pair, costs in formulation.problem.edges.items():
            digest.update(repr(pair).encode() + _bytes(costs))
        for item, counts in zip(timeline.items, timeline.counts, strict=True):
            digest.update(repr(item[1]).encode() + _bytes(timeline.bytes[item]) + _bytes(counts))
        return digest.hexdigest()


def _bytes(values: np.ndarray | Way | Moved) -> bytes:
    if isinstance(values, (Way, Moved)):
        return values.content()
    return np.ascontiguousarray(values, dtype=np.float64).tobytes()


def _solves(entry: _Entry, prepared: Draft) -> bool:
    """Whether an entry is a plan of the problem, costs what it says, and keeps the limit."""
    problem = prepared.formulation.problem
    if len(entry.choices) != len(problem.nodes) or any(
        choice >= size for choice, size in zip(entry.choices, problem.sizes, strict=True)
    ):
        return False
    seconds = evaluate(problem, entry.choices)
    sound = abs(seconds - entry.objective_s) <= _TIE * seconds and entry.bound_s <= seconds * (1 + _TIE)
    return sound and float(prepared.timeline.profile(entry.choices).max()) <= prepared.limit


def choices_from(plan: Plan, prepared: Draft) -> Sequence[int] | None:
    """The choices of `plan` as a start for the search of `prepared`; None, with a notice, where they are not all there.

    RequestError when the plan is for another mesh."""
    mesh = prepared.formulation.mesh
    if plan.mesh.shape != mesh.shape:
        raise RequestError(f"'warm' must be a plan for mesh {mesh}, got one for mesh {plan.mesh}; leave it out")
    found = recall(plan, prepared.formulation).choices
    if len(found) < len(prepared.formulation.decisions):
        _log.warning("the plan given as 'warm' is for another model or request in part: the search starts without it")
        return None
    return [found[index] for index in range(len(found))]

"""Which pipeline degree, mesh inside of it and number of micro-batches: tried one by one, the most promising first.

Anytime: the best plan so far is kept, and degrees are left out when their least work, shared out evenly over all ranks
without any idle time, already takes longer than it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from ...passes.graph import Captured
from ...passes.microbatches import splits
from ...passes.recompute import Recompute
from ...passes.trees import flatten_call
from ...plans.clusters import Cluster
from ...plans.errors import Infeasible, RequestError
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from ...plans.recipes import Recipe
from ..api import Draft
from ..sharding.accumulation import Reduce
from ..sharding.folding import Blocks
from ..solver.search import Progress
from ..zoo import named_schedule
from .mixed import Mixed, mixed_of
from .pipelined import Degrees, Joined, joined_draft, polished, solve_joined

__all__ = ["choose_degrees", "degrees_to_try"]

_MOST_RANKS = 16
# Micro-batches per pipeline rank, the usual first.
_PER_RANK = (4, 8, 2, 16, 1, 32)
# The least seconds that a search of one set of degrees gets.
_LEAST_S = 5.0
# Seconds, at most, for the pipeline of the best degrees.
_MOST_POLISH_S = 40.0


def choose_degrees(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    cluster: Cluster | str,
    mesh: Mesh | str | Sequence[Mesh | str] | None,
    pipeline: int | Literal["auto"],
    microbatches: int | Literal["auto"],
    schedule: str = "auto",
    recompute: Recompute | Literal["auto"] = "auto",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    solver: str = "highs",
    on_progress: Progress | None = None,
    **request: Any,
) -> Plan:
    """The fastest plan over the degrees that `pipeline`, `mesh` and `microbatches` leave open; others as for `plan`.

    Its bound is that of all degrees that were tried. Raises Infeasible when no degrees have a plan within memory.
    """
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    grid, each = _asked(mesh, pipeline)
    batch = _batch(args, kwargs)
    ranks = pipeline if each is None else len(each)
    tries = list(degrees_to_try(where, batch, pipeline=ranks, mesh=grid, microbatches=microbatches))
    tries = _runnable(tries, schedule)
    search = _Search(model, args, kwargs, where, recompute, schedule, gap, solver, request, each)
    began = time.perf_counter()
    for index, degrees in enumerate(tries):
        left = time_limit_s - (time.perf_counter() - began)
        if search.best is not None and left <= 0:
            break
        try:
            search.try_one(degrees, max(_LEAST_S, left / 2 if len(tries) - index > 1 else left))
        except KeyboardInterrupt:
            if search.best is None:
                raise
            break
        if on_progress is not None and search.best is not None:
            on_progress(f"pipeline {degrees}", search.best.step_s, search.best.bound_s)
    if search.best is None:
        assert search.failed is not None
        raise search.failed
    if each is None and grid is None:
        search.mix(time_limit_s - (time.perf_counter() - began))
    left = time_limit_s - (time.perf_counter() - began)
    seconds = min(_MOST_POLISH_S, max(_LEAST_S, left))
    if isinstance(search.best, Mixed):
        return search.best.polished(seconds, schedule).plan()
    best = polished(search.best, seconds, schedule)
    return replace(best, bound_s=min(best.bound_s, search.least_bound_s)).plan()


def _asked(
    mesh: Mesh | str | Sequence[Mesh | str] | None, pipeline: int | Literal["auto"]
) -> tuple[Mesh | None, tuple[Mesh, ...] | None]:
    """The mesh of all ranks or, where they have different ones, of the first rank, and those of each. RequestError for
    another number of meshes than `pipeline`, or of devices in them."""
    found = Mesh.parse_each(mesh) if isinstance(mesh, str) else mesh
    if found is None or isinstance(found, Mesh):
        return found, None
    each = tuple(Mesh.parse(one) if isinstance(one, str) else one for one in found)
    words = "/".join(map(str, each))
    if not each or (pipeline != "auto" and len(each) != pipeline):
        raise RequestError(
            f"'mesh' must be one for all pipeline ranks or one for each of {pipeline}, got {len(each)}: {words!r}; "
            "give as many as there are ranks"
        )
    if len({one.size for one in each}) > 1:
        raise RequestError(
            f"'mesh' must have equally many devices on each pipeline rank, got {words!r}; give meshes of one size"
        )
    return each[0], each if len(set(each)) > 1 else None


def _runnable(tries: Sequence[Degrees], schedule: str) -> list[Degrees]:
    """Those that `schedule` can run; RequestError, that of the first, where there are none."""
    if schedule == "auto":
        return list(tries)
    found, failed = [], None
    for degrees in tries:
        try:
            named_schedule(schedule, degrees.pipeline, degrees.microbatches)
            found.append(degrees)
        except RequestError as error:
            failed = failed or error
    if failed is not None and not found:
        raise failed
    return found


def degrees_to_try(
    cluster: Cluster,
    batch: int,
    *,
    pipeline: int | Literal["auto"],
    mesh: Mesh | None,
    microbatches: int | Literal["auto"],
) -> Iterator[Degrees]:
    """All degrees that use the whole cluster, and cut the batch evenly where `microbatches` is open. RequestError when
    there are none."""
    size, found = cluster.size, 0
    ranks = [pipeline] if pipeline != "auto" else [p for p in range(1, min(size, _MOST_RANKS) + 1) if size % p == 0]
    if ranks[0] < 1 or size % ranks[0]:
        fitting = [p for p in range(1, size + 1) if size % p == 0]
        raise RequestError(
            f"'pipeline' must divide the cluster's {size} devices, got {pipeline}; use one of {fitting[:12]}"
        )
    for p in ranks:
        if p < 1 or size % p or (mesh is not None and p * mesh.size != size):
            continue
        meshes = [mesh] if mesh is not None else list(_meshes(cluster, size // p))
        for count in _counts(batch, p, microbatches):
            for grid in meshes:
                found += 1
                yield Degrees(pipeline=p, mesh=grid, microbatches=count)
    if not found and mesh is not None and all(p * mesh.size != size for p in ranks):
        raise RequestError(
            f"'mesh' is that of one pipeline rank and must have {size} / pipeline devices, got {mesh} with a "
            f"pipeline of {pipeline}; leave the mesh out or change one of them"
        )
    if not found:
        raise RequestError(
            f"'microbatches' must be from 1 to the batch of {batch}, got {microbatches}; use a number of them"
        )


def _meshes(cluster: Cluster, devices: int) -> Iterator[Mesh]:
    """Meshes of one pipeline rank: all its devices in a row, and nodes by devices of a node where it spans several."""
    node = cluster.devices_per_node
    if devices <= node or devices % node:
        yield Mesh.of((devices,))
        if devices % 2 == 0 and 4 <= devices <= node:
            yield Mesh.of((2, devices // 2))
    else:
        yield Mesh.of((devices // node, node))


def _shapes(devices: int) -> Iterator[Mesh]:
    """All meshes of one or two axes with so many devices, the flattest first."""
    yield Mesh.of((devices,))
    for rows in range(2, devices):
        if devices % rows == 0:
            yield Mesh.of((rows, devices // rows))


def _counts(batch: int, ranks: int, microbatches: int | Literal["auto"]) -> Iterator[int]:
    if microbatches != "auto":
        if 1 <= microbatches <= batch:
            yield microbatches
        return
    wanted = (1, *_PER_RANK[:4]) if ranks == 1 else tuple(ranks * each for each in _PER_RANK)
    for count in dict.fromkeys(wanted):
        if count <= batch and batch % count == 0:
            yield count


def _batch(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Samples in the batch: dim 0 of the first input that has one."""
    tensors, _ = flatten_call(args, kwargs)
    cut = next((t for t, split in zip(tensors, splits(tensors), strict=True) if split), None)
    if cut is None:
        raise RequestError("'microbatches' must cut an input along dim 0, got none with a dim; plan without a pipeline")
    return cut.shape[0]


@dataclass(slots=True)
class _Search:
    """The best of what was tried, and the captures that several degrees share. `each` are the meshes of the pipeline
    ranks, where they were asked for and differ."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]
    cluster: Cluster
    recompute: Recompute | Literal["auto"]
    schedule: str
    gap: float
    solver: str
    request: dict[str, Any]
    each: tuple[Mesh, ...] | None = None
    best: Joined | Mixed | None = None
    failed: Infeasible | None = None
    least_bound_s: float = math.inf
    captures: dict[tuple[int, Recompute], tuple[Captured, Blocks]] = field(default_factory=dict)

    def try_one(self, degrees: Degrees, seconds: float) -> None:
        """Plan these degrees, with more recomputation and sooner reduced gradients too where memory binds, as long as
        there is time, and keep the fastest plan."""
        modes: Sequence[Recompute] = ("pointwise", "block") if self.recompute == "auto" else (self.recompute,)
        reductions = self._reductions(degrees)
        began, fits = time.perf_counter(), False
        for mode, reduce in itertools.product(modes, reductions):
            left = seconds - (time.perf_counter() - began)
            if fits and left <= 0:
                return
            try:
                left = max(_LEAST_S, left)
                if self.each is None:
                    found = self._joined(degrees, mode, reduce, left)
                else:
                    found = self._mixed(degrees, self.each, mode, reduce, left)
            except Infeasible as error:
                self.failed = error
                continue
            fits = True
            if found is None:
                continue
            self.least_bound_s = min(self.least_bound_s, found.bound_s)
            if self.best is None or found.step_s < self.best.step_s:
                self.best = found
            if isinstance(found, Mixed) or not found.binds:
                return

    def mix(self, seconds: float) -> None:
        """Give ranks of the best pipeline other meshes, where that is faster, in about so many seconds."""
        first = self.best
        if not isinstance(first, Joined) or first.degrees.pipeline == 1 or seconds < _LEAST_S:
            return
        options, accumulation = first.prepared.options, first.prepared.formulation.accumulation
        began, parts = time.perf_counter(), [first]
        others = [mesh for mesh in _shapes(first.degrees.mesh.size) if mesh != first.degrees.mesh]
        for mesh in others:
            left = 0.5 * seconds - (time.perf_counter() - began)
            if left < _LEAST_S:
                break
            degrees = replace(first.degrees, mesh=mesh)
            try:
                found = self._joined(degrees, options.recompute, accumulation.reduce, left / len(others), every=True)
            except Infeasible:
                continue
            if found is not None:
                parts.append(found)
        if len(parts) == 1:
            return
        left = 0.75 * seconds - (time.perf_counter() - began)
        mixed = mixed_of(parts, None, self.schedule, max(1.0, left))
        candidates: list[Joined | Mixed] = [*parts, *([] if mixed is None else [mixed])]
        self.best = min(candidates, key=lambda one: one.step_s)

    def _joined(
        self, degrees: Degrees, mode: Recompute, reduce: Reduce, seconds: float, *, every: bool = False
    ) -> Joined | None:
        """The plan of these degrees; None where it cannot be the best one and `every` does not ask for it."""
        prepared = self._draft(degrees, mode, reduce)
        better = None if every or self.best is None else self.best.step_s
        return solve_joined(
            prepared, degrees, schedule=self.schedule, time_limit_s=seconds, gap=self.gap, solver=self.solver,
            better_than_s=better,
        )  # fmt: skip

    def _mixed(
        self, degrees: Degrees, each: tuple[Mesh, ...], mode: Recompute, reduce: Reduce, seconds: float
    ) -> Mixed:
        """The plan in which pipeline rank r has the mesh `each[r]`. Infeasible where there is none within memory."""
        meshes = tuple(dict.fromkeys(each))
        parts: list[Joined] = []
        for mesh in meshes:
            one = self._joined(replace(degrees, mesh=mesh), mode, reduce, 0.7 * seconds / len(meshes), every=True)
            assert one is not None
            parts.append(one)
        found = mixed_of(parts, each, self.schedule, 0.3 * seconds)
        if found is None:
            raise Infeasible(
                f"'mesh' must leave a plan within memory, got {'/'.join(map(str, each))} with {degrees.microbatches} "
                "micro-batches; use smaller micro-batches, more devices or other meshes"
            )
        return found

    def _reductions(self, degrees: Degrees) -> Sequence[Reduce]:
        """When gradients may be reduced: once in a step, or where a recipe or memory asks for it in each part."""
        recipe = self.request.get("recipe")
        named = None if recipe is None else Recipe.parse(recipe, degrees.mesh)
        if degrees.microbatches == 1 or (named is not None and named.axes("zero1")):
            return ("step",)
        return ("microbatch",) if named is not None and named.axes("zero2") else ("step", "microbatch")

    def _draft(self, degrees: Degrees, mode: Recompute, reduce: Reduce) -> Draft:
        key = degrees.microbatches, mode
        made = joined_draft(
            self.model, self.args, self.kwargs, degrees,
            cluster=self.cluster, recompute=mode, reduce=reduce, known=self.captures.get(key), **self.request,
        )  # fmt: skip
        self.captures[key] = made.captured, made.blocks
        return made

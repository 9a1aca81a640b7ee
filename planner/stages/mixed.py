"""Pipelines whose ranks have different meshes: the sharding of each mesh is solved for itself, each rank takes the
units of its own, and what crosses between them is priced with the stages that give and take it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ...passes.stages import StageProgram, cut_stages
from ...plans.errors import RequestError
from ...plans.meshes import Mesh
from ...plans.plan import Crossing, Plan, Predicted
from ...plans.schedules import Schedule
from ..pipeline import Clock
from ..zoo import chunks_of, named_schedule
from .crossings import Side, Way, crossings_of, on_meshes
from .pipelined import Joined, bare_plan, memory_of, rank_limits, scaled_interval, sending
from .staging import PUBLISHED, Border, Staged, balanced_rows, fits_rank, stage_units, staged
from .units import Unit, unit_places, unit_starts

__all__ = ["Mixed", "mixed_of"]

# What another mesh on a rank must at least bring: plans with several are larger.
_LESS = 0.999
# Rounds of moving single units from stage to stage.
_MOVES = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """Several shardings of one captured model, of which each pipeline rank may take another: `parts` are solved for the
    same pipeline degree, number of micro-batches and recomputation, each on its own mesh.

    starts   where the captured units begin
    places   of each unit of the whole model, the captured unit that it is one of, and where it begins
    """

    parts: tuple[Joined, ...]
    sides: tuple[Side, ...]
    programs: tuple[StageProgram, ...]
    starts: tuple[str, ...]
    places: tuple[tuple[int, str], ...]
    send_s: Callable[[float], float]
    limits: tuple[int, ...]
    known: dict[tuple[int, int, int], tuple[Way, ...]] = field(default_factory=dict)

    @property
    def units(self) -> list[tuple[Unit, ...]]:
        """The units of the whole model, by sharding."""
        return [part.staged.units for part in self.parts]

    def ways(self, unit: int, before: int, after: int) -> tuple[Way, ...]:
        """The ways between a unit that lies in sharding `before` and the next one, in `after`."""
        at = self.places[unit][0]
        key = at, before, after
        if key not in self.known:
            programs = self.programs[at], self.programs[at + 1]
            self.known[key] = crossings_of(programs, (self.sides[before], self.sides[after]), self.send_s)
        return self.known[key]

    def staged(self, cuts: Sequence[int], schedule: Schedule, numbers: Sequence[int]) -> Staged:
        """The units in stages, where pipeline rank r has the sharding `numbers[r]`."""
        own = [numbers[rank] for rank in schedule.placement]
        edges = [0, *cuts, len(self.places)]
        units = [unit for at, number in enumerate(own) for unit in self.units[number][edges[at] : edges[at + 1]]]
        borders = {
            at: border_of(self.ways(cut - 1, before, after))
            for at, (cut, (before, after)) in enumerate(zip(cuts, itertools.pairwise(own), strict=True))
            if before != after
        }
        return staged(units, cuts, schedule, self.send_s, borders)

    def best(
        self, numbers: Sequence[int], microbatches: int, schedule: str, seeds: Iterable[tuple], clock: Clock
    ) -> Staged | None:
        """The fastest pipeline found with these shardings, else the one of least memory: published schedules on stages
        of even time, `seeds` (cuts and a schedule), and single units moved between stages. None without any."""
        found: list[Staged] = []
        for cuts, order in itertools.chain(self._published(numbers, microbatches, schedule), seeds):
            try:
                found.append(self.staged(cuts, order, numbers))
            except RequestError:
                # A value that cannot cross there.
                continue
        if not found:
            return None
        best = min(found, key=self._rank)
        for _ in range(_MOVES):
            moved = [one for one in self._moved(best, numbers, clock) if self._rank(one) < self._rank(best)]
            if not moved or clock.left_s <= 0:
                break
            best = min(moved, key=self._rank)
        return best

    def _rank(self, one: Staged) -> tuple[int, float]:
        return max(0, one.over_bytes(self.limits)), one.step_s

    def _published(self, numbers: Sequence[int], microbatches: int, asked: str) -> Iterator[tuple]:
        names = PUBLISHED if asked == "auto" else (asked,)
        ranks = len(numbers)
        for name, tight in itertools.product(names, (False, True)):
            stages = ranks * chunks_of(name)
            if len(self.places) < stages or (tight and stages > ranks):
                continue
            try:
                schedule = named_schedule(name, ranks, microbatches)
            except RequestError:
                if asked != "auto":
                    raise
                continue
            own = [self.units[numbers[rank]] for rank in schedule.placement]
            rows = [[u.forward_s + u.input_s + u.weight_s for u in units] for units in own]
            cuts = balanced_rows(rows, self._fits(own, ranks, microbatches) if tight else None)
            if cuts is None:
                continue
            pieces = zip(own, itertools.pairwise([0, *cuts, len(self.places)]), strict=True)
            costs = [_mean([u for units, (a, b) in pieces for u in units[a:b]], stages)]
            yield cuts, named_schedule(name, ranks, microbatches, costs=costs[0])

    def _fits(self, own: Sequence[Sequence[Unit]], ranks: int, microbatches: int) -> Callable[[int, int, int], bool]:
        return lambda stage, start, end: fits_rank(
            own[stage][start:end], min(ranks - stage, microbatches), self.limits[stage]
        )

    def _moved(self, given: Staged, numbers: Sequence[int], clock: Clock) -> Iterator[Staged]:
        """One unit more or less in a stage."""
        edges = [0, *given.cuts, len(self.places)]
        for at, step in itertools.product(range(1, len(edges) - 1), (-1, 1)):
            cut = edges[at] + step
            if not edges[at - 1] < cut < edges[at + 1] or clock.left_s <= 0:
                continue
            cuts = [*edges[1:at], cut, *edges[at + 1 : -1]]
            try:
                yield self.staged(cuts, given.schedule, numbers)
            except RequestError:
                continue


def _mean(units: Sequence[Unit], stages: int) -> tuple[float, float, float]:
    forward, backward, weight = (sum(getattr(u, k) for u in units) / stages for k in _TIMES)
    return forward, backward, weight


_TIMES = ("forward_s", "input_s", "weight_s")


def border_of(ways: Iterable[Way]) -> Border:
    """What all ways between two stages take together."""
    up, down = ([way for way in ways if way.gradient is back] for back in (False, True))
    return Border(
        send_s=max(sum(way.sending_s for way in up), sum(way.sending_s for way in down)),
        before_forward_s=sum(way.leaving_s for way in up),
        after_forward_s=sum(way.landing_s for way in up),
        after_backward_s=sum(way.leaving_s for way in down),
        before_backward_s=sum(way.landing_s for way in down),
    )


def mixture_of(parts: Sequence[Joined]) -> Mixture:
    """The shardings of `parts`, which are solved for the same captured model."""
    first = parts[0].prepared
    starts = unit_starts(first.captured, first.blocks)
    sides = tuple(
        Side(number, bare_plan(part.prepared, part.solution), part.prepared.formulation.transitions)
        for number, part in enumerate(parts)
    )
    return Mixture(
        parts=tuple(parts),
        sides=sides,
        programs=tuple(cut_stages(first.captured, starts)),
        starts=tuple(starts),
        places=tuple(unit_places(starts, first.blocks)),
        send_s=sending(first, parts[0].degrees),
        limits=rank_limits(first, parts[0].degrees.pipeline),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A pipeline whose rank r has the sharding `numbers[r]` of a mixture. `bound_s` is a step time that no plan with
    these meshes beats, on whichever ranks they are."""

    mixture: Mixture
    numbers: tuple[int, ...]
    staged: Staged
    bound_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.staged.step_s

    def plan(self) -> Plan:
        """As a plan, for the cluster that was asked for."""
        return _written(self)

    def polished(self, seconds: float, schedule: str) -> Mixed:
        """The same shardings with the best pipeline found in so many seconds more."""
        mixture, degrees = self.mixture, self.mixture.parts[0].degrees
        if schedule != "auto":
            return self
        tuned = stage_units(
            self.staged.units, degrees.pipeline, degrees.microbatches,
            send_s=mixture.send_s, limits=mixture.limits, clock=Clock(limit_s=0.7 * seconds),
        )  # fmt: skip
        found = mixture.best(
            self.numbers, degrees.microbatches, schedule, [(tuned.cuts, tuned.schedule)], Clock(limit_s=0.3 * seconds)
        )
        better = found is not None and found.over_bytes(mixture.limits) <= 0 and found.step_s < self.step_s
        return replace(self, staged=found) if found is not None and better else self


def mixed_of(parts: Sequence[Joined], meshes: Sequence[Mesh] | None, schedule: str, seconds: float) -> Mixed | None:
    """The fastest pipeline found with the sharding of `meshes[r]` on rank r, or, where `meshes` is None, with any of
    `parts` on each: from the best single one on, ranks are given another one as long as that is faster. None where none
    is within memory, or none is faster than the best single one."""
    mixture, clock = mixture_of(parts), Clock(limit_s=seconds)
    ranks, count = parts[0].degrees.pipeline, parts[0].degrees.microbatches
    seeds = [(part.staged.cuts, part.staged.schedule) for part in parts]
    bound = least_work_s(parts)
    if meshes is not None:
        numbers = tuple([part.degrees.mesh for part in parts].index(mesh) for mesh in meshes)
        staged_ = mixture.best(numbers, count, schedule, seeds, clock)
        if staged_ is None or staged_.over_bytes(mixture.limits) > 0:
            return None
        return Mixed(mixture=mixture, numbers=numbers, staged=staged_, bound_s=bound)
    first = min(range(len(parts)), key=lambda at: parts[at].step_s)
    best: tuple[float, tuple[int, ...], Staged | None] = parts[first].step_s, (first,) * ranks, None
    improved = True
    while improved and clock.left_s > 0:
        improved = False
        for rank, number in itertools.product(range(ranks), range(len(parts))):
            numbers = (*best[1][:rank], number, *best[1][rank + 1 :])
            if number == best[1][rank] or clock.left_s <= 0:
                continue
            found = mixture.best(numbers, count, schedule, seeds, clock)
            if found is not None and found.over_bytes(mixture.limits) <= 0 and found.step_s < best[0] * _LESS:
                best, improved = (found.step_s, numbers, found), True
    if best[2] is None:
        return None
    return Mixed(mixture=mixture, numbers=best[1], staged=best[2], bound_s=bound)


def least_work_s(parts: Sequence[Joined]) -> float:
    """Seconds of the step that no plan of these meshes beats: every op on the mesh on which it is fastest, nothing
    moved, all ranks busy throughout."""
    least: dict[str, float] = {}
    for part in parts:
        formulation = part.prepared.formulation
        for decision in formulation.decisions:
            if decision.kind == "op" and decision.node is not None:
                name = formulation.captured.names[decision.node]
                seconds = float(np.min(decision.seconds)) * decision.weight
                least[name] = min(least.get(name, np.inf), seconds)
    degrees = parts[0].degrees
    return sum(least.values()) * degrees.microbatches / degrees.pipeline


def _written(mixed: Mixed) -> Plan:
    mixture, staged_ = mixed.mixture, mixed.staged
    used = list(dict.fromkeys(mixed.numbers))
    numbers = [used.index(number) for number in mixed.numbers]
    parts = [mixture.parts[number] for number in used]
    views = [mixture.sides[number].plan for number in used]
    plan = on_meshes(views, numbers, tuple(_crossings(mixed, used))) if len(used) > 1 else views[0]
    step, bound = mixed.step_s, min(mixed.bound_s, mixed.step_s)
    solver = msgspec.structs.replace(
        plan.solver,
        status="feasible",
        objective_s=step,
        bound_s=bound,
        gap=max(0.0, 1.0 - bound / step) if step > 0 else 0.0,
        seconds=sum(view.solver.seconds for view in views),
        choices=sum(view.solver.choices for view in views),
    )
    reduce = parts[0].prepared.formulation.accumulation.reduce
    return msgspec.structs.replace(
        plan, predicted=_predicted(mixed, views, numbers), solver=solver, pipeline=staged_.pipeline(reduce)
    )


def _predicted(mixed: Mixed, views: Sequence[Plan], numbers: Sequence[int]) -> Predicted:
    """The mean over the ranks of what each sharding takes for the whole model."""
    degrees = mixed.mixture.parts[0].degrees
    times = degrees.microbatches / degrees.pipeline

    def mean(field_: str) -> float:
        return times * sum(getattr(views[number].predicted, field_) for number in numbers) / len(numbers)

    compute, step = mean("compute_s"), mixed.step_s
    return Predicted(
        step_time_s=step,
        step_time_interval_s=scaled_interval(views[0].predicted, step),
        compute_s=compute,
        exposed_communication_s=min(mean("exposed_communication_s"), step),
        hidden_communication_s=mean("hidden_communication_s"),
        optimizer_s=mean("optimizer_s"),
        recompute_s=min(compute, mean("recompute_s")),
        memory=memory_of(mixed.staged, mixed.mixture.limits),
    )


def _crossings(mixed: Mixed, used: Sequence[int]) -> Iterator[Crossing]:
    """The ways at the borders that the stages have, by the names of the whole model."""
    mixture, schedule = mixed.mixture, mixed.staged.schedule
    own = [mixed.numbers[rank] for rank in schedule.placement]
    seen: set[tuple[str, int, int]] = set()
    for cut, (before, after) in zip(mixed.staged.cuts, itertools.pairwise(own), strict=True):
        if before == after:
            continue
        rename = _renaming(mixture, cut - 1)
        for way in mixture.ways(cut - 1, before, after):
            crossing = msgspec.structs.replace(
                way.crossing,
                value=rename(way.crossing.value),
                before=used.index(way.crossing.before),
                after=used.index(way.crossing.after),
            )
            key = crossing.value, crossing.before, crossing.after
            if key not in seen:
                seen.add(key)
                yield crossing


def _renaming(mixture: Mixture, unit: int) -> Callable[[str], str]:
    """From the names of the captured units at a border to those of the blocks that they stand for there: between the
    unit `unit` of the whole model and the next one."""
    blocks = mixture.parts[0].prepared.blocks
    stands: dict[tuple[str, int], int] = {}
    folded = mixture.places[unit][0]
    for captured, at in ((folded, unit), (folded + 1, unit + 1)):
        first, real_first = mixture.starts[captured], mixture.places[at][1]
        known, real = (blocks.place(f"{name}.") if name else None for name in (first, real_first))
        if known is not None and real is not None:
            stands[known[0].path, known[1]] = real[1]

    def rename(name: str) -> str:
        place = blocks.place(name)
        if place is None or place[0] not in blocks.cut:
            return name
        run, repetition = place
        actual = stands.get((run.path, repetition), repetition)
        found = run.place(name)
        assert found is not None
        stamp = found[1]
        return stamp.put(name, str(stamp.numbers[actual]))

    return rename

"""What arrangements of one job take, and the best layers and order of stages for given groups. Everything is a pure
function of the job, kept once found; no time limit decides anything, so all survivors find the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...plans import Arrangement, Health, Replica
from .clocks import best_windows, even_layers, refine, shared_s
from .job import Job

__all__ = ["Group", "Workbench"]

# Devices of a group and the speed of the slowest: all that a group's time depends on.
Group = tuple[int, float]

# Up to so many cuts, and orders of stages, all are tried.
_ALL_CUTS = 300
_ALL_ORDERS = 24
_REFINED = 2


class Workbench:
    """Prices of one job's arrangements."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._sums = np.array(job.sums)
        reduced = 2.0 * (job.replicas - 1) / job.replicas / job.inter_bytes_per_s
        self._numbers = np.array([job.delay_s, job.memory_bytes, reduced])
        self._ends: dict[tuple[int, int], np.ndarray] = {}
        self._best: dict[tuple[tuple[Group, ...], int], tuple[tuple[Group, ...], tuple[int, ...], float]] = {}
        self._answers: dict[tuple[tuple[Group, ...], int], tuple[tuple[Group, ...], tuple[int, ...], float]] = {}
        self._priced: dict[tuple[tuple[Group, ...], tuple[int, ...], int, bool], float] = {}
        self._evened: dict[tuple[Group, ...], tuple[int, ...]] = {}
        self._shared: dict[object, float] = {}

    def replica_s(
        self, groups: Sequence[Group], layers: Sequence[int], microbatches: int, *, usual: bool = False
    ) -> float:
        """Seconds of one replica by itself; inf where its devices' memory is too small. usual: 1F1B's own windows."""
        key = (tuple(groups), tuple(layers), microbatches, usual)
        if key not in self._priced:
            cuts = np.array([0, *itertools.accumulate(layers)])
            self._priced[key] = float(best_windows(cuts, *self._arrays(groups), microbatches, usual,
                                                   *self._scratch(len(groups), microbatches)))  # fmt: skip
        return self._priced[key]

    def windows(self, groups: Sequence[Group], layers: Sequence[int], microbatches: int) -> tuple[int, ...]:
        """How many forwards each stage does before its first backward, in the schedule that `replica_s` is for."""
        cuts = np.array([0, *itertools.accumulate(layers)])
        parts, counts, ends = self._scratch(len(groups), microbatches)
        best_windows(cuts, *self._arrays(groups), microbatches, False, parts, counts, ends)
        wide, found = int(counts[2, 0]), []
        for stage, room in enumerate(counts[0].tolist()):
            window = min(room, wide * (len(groups) - stage)) if wide else room
            found.append(min([window, *found[-1:]]))
        return tuple(min(window, microbatches) for window in found)

    def best(self, groups: Sequence[Group], microbatches: int) -> tuple[tuple[Group, ...], tuple[int, ...], float]:
        """The best order of these groups found, their layers, and the seconds; equal groups give equal answers."""
        kinds = tuple(sorted(groups, reverse=True))
        asked = (kinds, microbatches)
        if asked not in self._answers:
            self._answers[asked] = self._found(kinds, microbatches)
        return self._answers[asked]

    def _found(self, kinds: tuple[Group, ...], microbatches: int) -> tuple[tuple[Group, ...], tuple[int, ...], float]:
        groups = kinds
        few = math.comb(self.job.layers - 1, len(groups) - 1) <= _ALL_CUTS
        # Where layers are searched and not all tried, they are searched for like numbers of micro-batches at once.
        key = (kinds, microbatches if few else _rounded(microbatches))
        if key not in self._best:
            tried = sorted(
                ((*self._layers(order, key[1], fine=False), order) for order in _orders(kinds)),
                key=lambda one: (one[1], one[0]),
            )
            kept = tried if few else tried[:_REFINED]
            fine = [(*self._layers(order, key[1], fine=True), order) for *_, order in kept]
            layers, seconds, order = min(fine, key=lambda one: (one[1], one[0], one[2]))
            self._best[key] = (order, layers, seconds)
        order, layers, seconds = self._best[key]
        if key[1] == microbatches or math.isinf(seconds):
            return order, layers, seconds
        return order, layers, self.replica_s(order, layers, microbatches)

    def price(self, arrangement: Arrangement, health: Health, *, usual: bool = False) -> float:
        """Seconds of one step of an arrangement on devices of this health; inf where it cannot run."""
        speeds = self.job.speeds(health)
        if any(speeds[device] == 0 for device in arrangement.devices):
            return math.inf
        if arrangement.loads is not None:
            return self._price_shared(arrangement, speeds)
        return max(
            self.replica_s(kinds_of(replica.groups, speeds), replica.layers, replica.microbatches, usual=usual)
            for replica in arrangement.replicas
        )

    def _price_shared(self, arrangement: Arrangement, speeds: Sequence[float]) -> float:
        job, loads = self.job, arrangement.loads
        assert loads is not None
        layers = arrangement.replicas[0].layers
        cuts = [0, *itertools.accumulate(layers)]
        kinds = tuple(
            tuple(group_of(group, speeds) if group else (0, 0.0) for group in replica.groups)
            for replica in arrangement.replicas
        )
        begins = tuple(replica.microbatches for replica in arrangement.replicas)
        key = (kinds, begins, loads, layers)
        if key not in self._shared:
            times = [[self._stage_s(group, cuts[s], cuts[s + 1]) for s, group in enumerate(row)] for row in kinds]
            # 1F1B's own windows, wider by the share of other replicas' micro-batches.
            room = [
                [
                    min(
                        max(1, math.ceil((len(layers) - s) * max(1.0, loads[s][d] / max(1, begins[d])))),
                        times[d][s][2],
                    )
                    for s in range(len(layers))
                ]
                for d in range(len(kinds))
            ]
            fits = all(loads[s][d] == 0 or room[d][s] > 0 for s in range(len(layers)) for d in range(len(kinds)))
            self._shared[key] = (
                shared_s([[t[0] for t in row] for row in times], [[t[1] for t in row] for row in times], begins, loads,
                         job.delay_s, room) + max(t[3] for row in times for t in row)
                if fits else math.inf
            )  # fmt: skip
        return self._shared[key]

    def _stage_s(self, group: Group, low: int, high: int) -> tuple[float, float, int, float]:
        """Forward and backward seconds, micro-batches that fit in memory, and seconds of the gradients' reduction."""
        degree, speed = group
        if not degree:
            return 0.0, 0.0, 0, 0.0
        forward, backward, state, gradient, held, moved = (row[high] - row[low] for row in self.job.sums)
        rate = degree * speed / self.job.tensor
        moved *= 2 * (degree - 1) / degree / self.job.intra_bytes_per_s
        left = self.job.memory_bytes - state / degree
        fits = 0 if left < 0 else 2**30 if held == 0 else int(min(2**30, left / (held / degree)))
        return forward / rate + moved, backward / rate + moved, fits, gradient / degree * float(self._numbers[2])

    def _layers(self, groups: tuple[Group, ...], microbatches: int, *, fine: bool) -> tuple[tuple[int, ...], float]:
        """The best layers of groups in this order; all cuts where they are few, else even ones refined."""
        stages, layers = len(groups), self.job.layers
        if stages > layers:
            return (), math.inf
        if math.comb(layers - 1, stages - 1) <= _ALL_CUTS:
            every = (
                tuple(b - a for a, b in itertools.pairwise((0, *cut, layers)))
                for cut in itertools.combinations(range(1, layers), stages - 1)
            )
            return min(
                ((one, self.replica_s(groups, one, microbatches)) for one in every), key=lambda one: (one[1], one[0])
            )
        even = self._even(groups)
        if not fine:
            return even, self.replica_s(groups, even, microbatches)
        cuts = np.array([0, *itertools.accumulate(even)])
        # Beyond a few rounds of the pipeline more micro-batches say nothing new about its layers.
        tried = min(microbatches, 3 * stages)
        refine(cuts, *self._arrays(groups), tried, *self._scratch(stages, tried))
        found = tuple(int(count) for count in np.diff(cuts))
        return min(((one, self.replica_s(groups, one, microbatches)) for one in (even, found)), key=lambda one: one[1])

    def _even(self, groups: tuple[Group, ...]) -> tuple[int, ...]:
        """Layers in order so that the slowest stage is as quick as it can be (by computation alone)."""
        if groups not in self._evened:
            rates = np.array([degree * speed for degree, speed in groups])
            counts = np.zeros(len(groups), np.int64)
            even_layers(self._sums[0] + self._sums[1], rates, counts)
            self._evened[groups] = tuple(counts.tolist())
        return self._evened[groups]

    def _arrays(self, groups: Sequence[Group]) -> tuple[np.ndarray, ...]:
        degree = np.array([group[0] for group in groups], float)
        rate = degree * np.array([group[1] for group in groups]) / self.job.tensor
        share = 2.0 * (degree - 1) / degree / self.job.intra_bytes_per_s
        return self._sums, rate, degree, share, self._numbers

    def _scratch(self, stages: int, microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = (stages, microbatches)
        if key not in self._ends:
            self._ends[key] = np.zeros((2, stages, microbatches))
        return np.zeros((3, stages)), np.zeros((3, stages), np.int64), self._ends[key]


def group_of(devices: Sequence[int], speeds: Sequence[float]) -> Group:
    """How many devices and the speed of the slowest."""
    known = getattr(speeds, "kinds", None)
    if known is None:
        return len(devices), min([speeds[device] for device in devices])
    group = tuple(devices)
    if group not in known:
        known[group] = (len(group), min([speeds[device] for device in group]))
    return known[group]


def kinds_of(groups: Iterable[tuple[int, ...]], speeds: Sequence[float]) -> list[Group]:
    """`group_of` each of several."""
    known = getattr(speeds, "kinds", {})
    return [known.get(group) or group_of(group, speeds) for group in groups]


def replica_of(groups: Sequence[Sequence[int]], layers: Sequence[int], microbatches: int) -> Replica:
    """A replica of these groups in this order."""
    return Replica(groups=tuple(tuple(group) for group in groups), layers=tuple(layers), microbatches=microbatches)


def _rounded(count: int) -> int:
    """`count` to two binary digits: 1, 2, 3, 4, 6, 8, 12, 16, 24 ..."""
    unit = 1 << max(0, count.bit_length() - 2)
    return max(1, count // unit * unit)


def _orders(groups: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
    """All orders of a few groups that differ; of many the sorted ones, and the odd ones put at every place."""
    kinds: dict[Group, int] = {}
    for group in groups:
        kinds[group] = kinds.get(group, 0) + 1
    count = math.factorial(len(groups)) if len(groups) <= 12 else math.inf
    for copies in kinds.values():
        count = count / math.factorial(copies) if math.isfinite(count) else count
    if len(kinds) == 2 and min(kinds.values()) == 1:
        odd = min(kinds, key=lambda kind: (kinds[kind], kind))
        (usual,) = (kind for kind in kinds if kind != odd)
        for place in range(len(groups)):
            yield tuple(odd if place == at else usual for at in range(len(groups)))
    elif count <= _ALL_ORDERS:
        yield from _arranged(kinds)
    else:
        yield from {groups: None, groups[::-1]: None, groups[::2] + groups[1::2][::-1]: None}


def _arranged(kinds: dict[Group, int]) -> Iterator[tuple[Group, ...]]:
    """All sequences that have each kind so often."""
    if not any(kinds.values()):
        yield ()
    for kind in sorted(kind for kind, count in kinds.items() if count):
        yield from ((kind, *rest) for rest in _arranged({**kinds, kind: kinds[kind] - 1}))

"""Which devices of a node work together: tensor groups of any allowed degree, the slowest left out where that pays.

A group is as fast as its slowest member, so for given degrees it is best to sort the devices by speed and to take
groups as runs of neighbours: exchanging members towards that never makes a group slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

__all__ = ["best_group", "node_options", "node_splits"]


def best_group(
    devices: Sequence[int], speeds: Sequence[float], degrees: Sequence[int], least: int = 1
) -> tuple[int, ...]:
    """The k fastest devices with the largest k times the slowest's speed; of equal ones the smaller group.

    () where fewer than `least` live.
    """
    order = sorted((device for device in devices if speeds[device] > 0), key=lambda device: (-speeds[device], device))
    best: tuple[float, int] = (0.0, 0)
    for degree in degrees:
        if least <= degree <= len(order):
            score = degree * speeds[order[degree - 1]]
            if score > best[0] * (1 + 1e-12):
                best = (score, degree)
    return tuple(sorted(order[: best[1]]))


def node_splits(count: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All sequences of degrees for runs over `count` devices in the order of their speed; what is left is idle."""

    @cache
    def splits(left: int) -> tuple[tuple[int, ...], ...]:
        return ((), *((degree, *rest) for degree in degrees if degree <= left for rest in splits(left - degree)))

    return sorted(set(splits(count)))


def node_options(
    devices: Sequence[int], speeds: Sequence[float], degrees: Sequence[int]
) -> list[tuple[tuple[int, ...], ...]]:
    """All ways to form groups in one node that differ in the groups' sizes and speeds, the largest total first."""
    order = sorted((device for device in devices if speeds[device] > 0), key=lambda device: (-speeds[device], device))
    found: dict[tuple, tuple[tuple[int, ...], ...]] = {}
    for split in node_splits(len(order), tuple(degrees)):
        at, groups = 0, []
        for degree in split:
            groups.append(tuple(sorted(order[at : at + degree])))
            at += degree
        kind = tuple(sorted((len(group), min(speeds[d] for d in group)) for group in groups))
        found.setdefault(kind, tuple(groups))
    return [
        groups
        for _, groups in sorted(
            ((-sum(degree * speed for degree, speed in kind), kind), groups) for kind, groups in found.items()
        )
    ]

"""Exact elimination over small tables; where a table would be too large a node is split and the sum is a bound.

A step sums the costs that mention its node and takes the least over the node: a message on the neighbours left.
A split node has several steps, each with a part of its costs, free to choose differently: a relaxation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .problem import Pair

__all__ = [
    "Step",
    "Tables",
    "Totals",
    "beliefs",
    "decode",
    "eliminate",
    "is_exact",
    "lines",
    "order",
    "relaxed",
    "totals",
    "work",
]

# Entries of one chunk of a table: small enough to stay in a core's cache.
_CHUNK = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One node (or one part of a split node) leaves; `scope` are its neighbours still there, ascending."""

    node: int
    scope: tuple[int, ...]
    edges: tuple[Pair, ...]
    inputs: tuple[int, ...]
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """A pass over the steps: the costs it was given, the messages it produced and the bound they prove."""

    steps: tuple[Step, ...]
    nodes: Sequence[np.ndarray]
    edges: Mapping[Pair, np.ndarray]
    shifts: Mapping[int, np.ndarray]
    messages: list[np.ndarray]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """A bound on the total of any plan, of any with a given choice of a node, and with given choices of a pair."""

    bound: float
    nodes: dict[int, np.ndarray]
    edges: Callable[[Pair], np.ndarray]


def order(
    sizes: Sequence[int],
    pairs: Iterable[Pair],
    *,
    cap: float,
    only: frozenset[int] | None = None,
) -> tuple[Step, ...]:
    """Steps for all nodes, cheapest table first, none above `cap` entries; with `only`, only those nodes, unsplit, two
    neighbours at most."""
    scopes: list[frozenset[int]] = []
    at: list[set[int]] = [set() for _ in sizes]
    keys: list[Pair | int] = []

    def put(scope: Iterable[int], key: Pair | int) -> None:
        scopes.append(frozenset(scope))
        keys.append(key)
        for member in scopes[-1]:
            at[member].add(len(scopes) - 1)

    for pair in pairs:
        put(pair, pair)
    left = set(range(len(sizes))) if only is None else set(only)

    def table(node: int) -> float:
        # What is left beside `only` must be a problem of nodes and pairs, so its messages have at most two axes.
        union = _union(scopes, at[node], node)
        return math.inf if only is not None and len(union) > 3 else _entries(sizes, union)

    weight = {node: table(node) for node in left}
    steps: list[Step] = []
    while left:
        node = min(left, key=lambda n: (weight[n], n))
        if weight[node] > cap and only is not None:
            break
        left.remove(node)
        groups = _groups(sizes, node, sorted(at[node]), scopes, cap)
        touched: set[int] = set()
        for group in groups:
            scope = _union(scopes, group, node) - {node}
            touched |= scope
            steps.append(_step(node, scope, [keys[f] for f in group], len(groups)))
            for factor in group:
                for member in scopes[factor]:
                    at[member].discard(factor)
            if scope:
                put(scope, len(steps) - 1)
        for other in touched & left:
            weight[other] = table(other)
    return tuple(steps)


def eliminate(
    steps: tuple[Step, ...],
    nodes: Sequence[np.ndarray],
    edges: Mapping[Pair, np.ndarray],
    shifts: Mapping[int, np.ndarray] | None = None,
) -> Tables:
    """Run the steps: the bound is the least total, exactly so when no node is split."""
    tables = Tables(steps=steps, nodes=nodes, edges=edges, shifts=shifts or {}, messages=[], bound=0.0)
    totals: list[float] = []
    for index, step in enumerate(steps):
        least: np.ndarray | None = None
        for _, chunk in _chunks(_views(tables, index)):
            low = chunk.min(axis=0)
            least = low if least is None else np.minimum(least, low, out=least)
        assert least is not None
        tables.messages.append(least)
        if not step.scope:
            totals.append(float(least))
    return replace(tables, bound=sum(totals))


def decode(tables: Tables, chosen: Mapping[int, int] | None = None) -> dict[int, int]:
    """A plan, node by node against the order of the steps; a best one when no node is split."""
    plan = dict(chosen or {})
    for node, line in lines(tables, plan):
        plan[node] = int(line.argmin())
    return plan


def lines(tables: Tables, plan: Mapping[int, int]) -> Iterator[tuple[int, np.ndarray]]:
    """Each node against the order of the steps, with the cost of its choices given `plan`, which the caller fills."""
    steps = tables.steps
    line = np.empty(0)
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if index == len(steps) - 1 or steps[index + 1].node != step.node:
            line = tables.nodes[step.node].copy()
        for pair in step.edges:
            matrix = tables.edges[pair]
            line += matrix[:, plan[pair[1]]] if pair[0] == step.node else matrix[plan[pair[0]]]
        for source in step.inputs:
            place = tuple(slice(None) if axis == step.node else plan[axis] for axis in steps[source].scope)
            line += tables.messages[source][place]
        if index == 0 or steps[index - 1].node != step.node:
            yield step.node, line


def relaxed(tables: Tables) -> list[dict[int, int]]:
    """Per step, the choices that attain the bound for its node and scope; parts of a split node may differ."""
    steps = tables.steps
    seats: list[dict[int, int]] = [{} for _ in steps]
    for index in range(len(steps) - 1, -1, -1):
        step, seat = steps[index], seats[index]
        line = sum(_at(view, step, seat) for view in _views(tables, index))
        seat[step.node] = int(np.argmin(line))
        for source in step.inputs:
            seats[source] = {axis: seat[axis] for axis in steps[source].scope}
    return seats


def _at(view: np.ndarray, step: Step, seat: Mapping[int, int]) -> np.ndarray:
    """A view on (node, *scope) at the seat of the scope."""
    place = (0 if n == 1 else seat[axis] for n, axis in zip(view.shape[1:], step.scope, strict=True))
    return view[(slice(None), *place)]


def totals(tables: Tables, constant: float = 0.0) -> Totals:
    """What any plan must cost with each choice and each pair: the parts of a split node give the larger of theirs.

    `constant` is what the tables lack.
    """
    steps, pairs = beliefs(tables)
    nodes: dict[int, np.ndarray] = {}
    for step, own in zip(tables.steps, steps, strict=True):
        nodes[step.node] = np.maximum(nodes[step.node], own + constant) if step.node in nodes else own + constant
    return Totals(bound=tables.bound + constant, nodes=nodes, edges=lambda pair: pairs[pair] + constant)


def beliefs(tables: Tables) -> tuple[list[np.ndarray], dict[Pair, np.ndarray]]:
    """Least totals per step and choice, and per pair of choices: the pass back from the last step to the first."""
    steps = tables.steps
    outside: dict[int, np.ndarray] = {}
    own: list[np.ndarray] = [np.empty(0)] * len(steps)
    pairs: dict[Pair, np.ndarray] = {}
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        target = (step.node, *step.scope)
        rest = outside.pop(index, None)
        if rest is None:
            rest = np.asarray(tables.bound - tables.messages[index])
        wanted = [(step.node,), *step.edges, *(steps[source].scope for source in step.inputs)]
        views = [*_views(tables, index), _aligned(rest, step.scope, target)]
        found = _project(views, target, wanted)
        own[index] = found[0]
        pairs.update(zip(step.edges, found[1 : 1 + len(step.edges)], strict=True))
        for source, least in zip(step.inputs, found[1 + len(step.edges) :], strict=True):
            message = tables.messages[source]
            outside[source] = least - np.where(np.isinf(message), 0.0, message)
    return own, pairs


def is_exact(steps: Sequence[Step]) -> bool:
    """Whether no node is split."""
    return all(step.parts == 1 for step in steps)


def work(steps: Sequence[Step], sizes: Sequence[int]) -> float:
    """Table entries that one pass computes."""
    return sum(_entries(sizes, (step.node, *step.scope)) for step in steps)


def _step(node: int, scope: Iterable[int], keys: Iterable[Pair | int], parts: int) -> Step:
    edges = tuple(key for key in keys if isinstance(key, tuple))
    inputs = tuple(key for key in keys if isinstance(key, int))
    return Step(node=node, scope=tuple(sorted(scope)), edges=edges, inputs=inputs, parts=parts)


def _groups(
    sizes: Sequence[int], node: int, factors: list[int], scopes: list[frozenset[int]], cap: float
) -> list[list[int]]:
    """The node's factors, packed into as few tables of at most `cap` entries as a greedy pass finds."""
    if not factors or _entries(sizes, _union(scopes, factors, node)) <= cap:
        return [factors]
    groups: list[list[int]] = []
    unions: list[frozenset[int]] = []
    for factor in sorted(factors, key=lambda f: -_entries(sizes, scopes[f])):
        for place, union in enumerate(unions):
            if _entries(sizes, union | scopes[factor]) <= cap:
                groups[place].append(factor)
                unions[place] = union | scopes[factor]
                break
        else:
            groups.append([factor])
            unions.append(scopes[factor])
    return groups


def _union(scopes: list[frozenset[int]], factors: Iterable[int], node: int) -> frozenset[int]:
    return frozenset({node}).union(*(scopes[f] for f in factors))


def _entries(sizes: Sequence[int], members: Iterable[int]) -> float:
    return math.prod(float(sizes[m]) for m in members)


def _aligned(array: np.ndarray, axes: tuple[int, ...], target: tuple[int, ...]) -> np.ndarray:
    """A view of `array` with one axis per target, absent ones of length 1."""
    present = [axes.index(axis) for axis in target if axis in axes]
    return array.transpose(present)[tuple(slice(None) if axis in axes else None for axis in target)]


def _views(tables: Tables, index: int) -> list[np.ndarray]:
    """A step's costs on (node, *scope), smallest first so that the sum grows late."""
    step = tables.steps[index]
    target = (step.node, *step.scope)
    own = tables.nodes[step.node]
    if step.parts > 1:
        own = own / step.parts
        if index in tables.shifts:
            own = own + tables.shifts[index]
    views = [_aligned(own, (step.node,), target)]
    views += [_aligned(tables.edges[pair], pair, target) for pair in step.edges]
    views += [_aligned(tables.messages[s], tables.steps[s].scope, target) for s in step.inputs]
    return sorted(views, key=lambda view: view.size)


def _chunks(views: list[np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """The sum of the views, some choices of the node at a time."""
    shape = np.broadcast_shapes(*(view.shape for view in views))
    stride = max(1, _CHUNK * shape[0] // max(1, math.prod(shape)))
    for start in range(0, shape[0], stride):
        part = slice(start, start + stride)
        total = views[0] if views[0].shape[0] == 1 else views[0][part]
        for view in views[1:]:
            total = total + (view if view.shape[0] == 1 else view[part])
        yield part, total


def _project(views: list[np.ndarray], target: tuple[int, ...], wanted: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Least of the summed views over all axes but the wanted ones, for each tuple of wanted axes (ascending)."""
    shape = np.broadcast_shapes(*(view.shape for view in views))
    out = [np.full([n for n, axis in zip(shape, target, strict=True) if axis in axes], np.inf) for axes in wanted]
    for part, chunk in _chunks(views):
        for axes, least in zip(wanted, out, strict=True):
            low = chunk.min(axis=tuple(k for k, axis in enumerate(target) if axis not in axes))
            place = least[part] if target[0] in axes else least
            np.minimum(place, low, out=place)
    order_of = [[[a for a in target if a in axes].index(axis) for axis in axes] for axes in wanted]
    return [least.transpose(axes) for least, axes in zip(out, order_of, strict=True)]

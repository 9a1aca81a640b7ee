"""The plan that takes least memory: bytes at one moment of the step in place of seconds."""

from __future__ import annotations

from dataclasses import replace

from .problem import Problem, Row

__all__ = ["costing"]


def costing(problem: Problem, row: Row, unit: float) -> Problem:
    """`problem` with the bytes that `row` counts added to its seconds, `unit` of them for a second."""
    nodes = list(problem.nodes)
    edges = dict(problem.edges)
    for node, values in row.nodes.items():
        nodes[node] = nodes[node] + values / unit
    for pair, values in row.edges.items():
        edges[pair] = edges.get(pair, 0.0) + values / unit
    return replace(problem, nodes=tuple(nodes), edges=edges)

"""Whether three captured repetitions of a deep run stand for all of them.

They do when nothing outside of the run is computed once per block: `h = h + block(h)` adds outside of the block, and
a plan of three blocks has no entry for the fourth sum. Of a period of several blocks, read repetition for block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from ...passes.blocks import Run
from ...passes.graph import Captured
from .folding import CAPTURED, MIDDLE, Blocks

__all__ = ["stands_for_all"]

_ALL = frozenset(range(CAPTURED))
_Reach = dict[fx.Node, frozenset[int]]


def stands_for_all(captured: Captured, blocks: Blocks, run: Run) -> bool:
    """Whether the middle block of `run`, which was cut, looks like its neighbours, passes tensors only to the next
    block and to the outside, and no node of the outside belongs to one block or to some."""
    inside = _repetitions(captured, run)
    found: dict[str, set[int]] = {}
    handed: dict[tuple[str, int], dict[int, set[str]]] = {}
    for node, number in inside.items():
        if node.op != "call_function":
            continue
        pattern = blocks.pattern(captured.names[node])
        found.setdefault(pattern, set()).add(number)
        for source in node.all_input_nodes:
            step = inside.get(source, number) - number
            if abs(step) > 1:
                return False
            if step:
                what = blocks.pattern(captured.names[source])
                handed.setdefault((pattern, step), {}).setdefault(number, set()).add(what)
    # The middle block must take from a neighbour what that one would take from it: a sum over blocks begins otherwise.
    if any(len(set(map(frozenset, by.values()))) > 1 for by in handed.values()):
        return False
    if not found or any(numbers == {MIDDLE} for numbers in found.values()):
        return False
    return not any(inside.get(node) == MIDDLE for node in captured.outputs if node is not None) and not any(
        _per_block(above, below) for above, below in _outside(captured, inside)
    )


def _per_block(above: frozenset[int], below: frozenset[int]) -> bool:
    """Whether there are more of a node when there are more blocks, from the blocks it reads from and those it feeds.

    What touches the first or the last block alone is there once; so is what every block reads and none makes.
    """
    return MIDDLE in above or (MIDDLE in below and (bool(above) or below != _ALL))


def _outside(captured: Captured, inside: Mapping[fx.Node, int]) -> Iterable[tuple[frozenset[int], frozenset[int]]]:
    """For every node outside of the list the blocks that it reads from and feeds, itself or through others outside."""
    nodes = [node for node in captured.graph.nodes if node.op != "output"]
    above = _reach(nodes, inside, lambda node: node.all_input_nodes)
    below = _reach(reversed(nodes), inside, lambda node: list(node.users))
    return [(above[node], below[node]) for node in nodes if node not in inside]


def _reach(nodes: Iterable[fx.Node], inside: Mapping[fx.Node, int], neighbours: object) -> _Reach:
    reach: _Reach = {}
    for node in nodes:
        near = [n for n in neighbours(node) if n.op != "output"]  # type: ignore[operator]
        reach[node] = frozenset[int]().union(*(({inside[n]} if n in inside else reach[n]) for n in near))
    return reach


def _repetitions(captured: Captured, run: Run) -> dict[fx.Node, int]:
    """Which of the captured repetitions (0, 1, 2) every node that lies in one belongs to."""
    places = {node: run.place(name) for node, name in captured.names.items()}
    return {node: min(place[0], CAPTURED - 1) for node, place in places.items() if place is not None}

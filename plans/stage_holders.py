"""Which pipeline ranks hold what, by a plan alone: from the ops of the forward that read parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator

from .errors import PlanError
from .plan import Node, Plan
from .stamps import Stamp, stamped_block

__all__ = ["stage_holders"]


# A tensor that several ops read, as it lies for them; a gradient as it leaves the step.
_TENSORS = ("::keep", "::gradient")


def stage_holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold each parameter and buffer that a stage reads, by the names of single blocks.

    PlanError where a stage begins with nothing that the plan's nodes have.
    """
    assert plan.pipeline is not None
    ops = list(_forward(plan))
    starts: list[int] = []
    for stage in plan.pipeline.stages:
        least = starts[-1] + 1 if starts else 0
        start = next((i for i in range(least, len(ops)) if _lies_in(ops[i][0], stage.first)), None)
        if start is None:
            raise PlanError(
                f"plan key 'pipeline.stages' must begin with ops of the plan in their order, got {stage.first!r}; plan "
                "this model again"
            )
        starts.append(start)
    held: dict[str, set[int]] = {}
    for stage, start, end in zip(plan.pipeline.stages, starts, [*starts[1:], len(ops)], strict=True):
        for _, sources in ops[start:end]:
            for source in (one for one in sources if "::" not in one):
                held.setdefault(source, set()).add(stage.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in held.items()}


def _lies_in(name: str, first: str) -> bool:
    return not first or name == first or name.startswith((f"{first}.", f"{first}::"))


def _forward(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """The ops of the forward in their order, each by its own name, with the names of what it reads."""
    stamps = {stamp.pattern: stamp for stamp in plan.model.stamps()}
    run: list[tuple[Node, Stamp | None]] = []
    path: str | None = None
    for node in plan.nodes:
        if "::bwd." in node.name or node.name.endswith(_TENSORS):
            continue
        stamp = stamps.get(stamped_block(node.name, stamps) or "")
        here = stamp.path if stamp is not None else _list_of(node.name, stamps)
        if here != path:
            yield from _numbered(run, path)
            run, path = [], here
        run.append((node, stamp))
    yield from _numbered(run, path)


def _list_of(name: str, stamps: dict[str, Stamp]) -> str | None:
    """The list that a block of its own kind lies in, where others of it go by a stamp."""
    for stamp in stamps.values():
        lead = f"{stamp.path}." if stamp.path else ""
        if name.startswith(lead) and name[len(lead) :].partition(".")[0].partition(":")[0].isdecimal():
            return stamp.path
    return None


def _numbered(run: list[tuple[Node, Stamp | None]], path: str | None) -> Iterator[tuple[str, list[str]]]:
    """The nodes of a list of blocks, block by block; others as they come."""
    found: list[tuple[int, str, list[str]]] = []
    lead = f"{path}." if path else ""
    for node, stamp in run:
        sources = [edge.source.removesuffix(_TENSORS[0]) for edge in node.inputs]
        if stamp is None:
            number = node.name[len(lead) :].partition(".")[0].partition(":")[0] if path is not None else "0"
            found.append((int(number), node.name, sources))
            continue
        for at, (number, name) in enumerate(zip(stamp.numbers, stamp.names(node.name), strict=True)):
            own = [stamp.names(s)[at] if s.startswith(stamp.pattern) else s for s in sources]
            found.append((number, name, own))
    found.sort(key=lambda one: one[0])
    yield from ((name, sources) for _, name, sources in found)

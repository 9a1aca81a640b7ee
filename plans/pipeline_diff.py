"""What changes from one plan's pipeline to another's: ranks, micro-batches, stages, and each rank's order."""

from __future__ import annotations

from collections.abc import Iterator

from .pipelines import Pipeline

__all__ = ["Row", "pipeline_rows"]

# Kind, name, what differs, before and after; None where only the other plan has it.
Row = tuple[str, str, str, str | None, str | None]


def pipeline_rows(first: Pipeline | None, second: Pipeline | None) -> Iterator[Row]:
    """All that differs between two pipelines but for what they are predicted to cost."""
    if first is None or second is None:
        if first is not second:
            yield ("pipeline", "ranks", "number", "1" if first is None else str(first.ranks),
                   "1" if second is None else str(second.ranks))  # fmt: skip
            yield ("pipeline", "microbatches", "number", "1" if first is None else str(first.microbatches),
                   "1" if second is None else str(second.microbatches))  # fmt: skip
        return
    for name, what in (("ranks", "number"), ("microbatches", "number"), ("reduce_gradients", "once in a")):
        before, after = str(getattr(first, name)), str(getattr(second, name))
        if before != after:
            yield "pipeline", name, what, before, after
    yield from _stages(first, second)
    if (first.ranks, first.microbatches) == (second.ranks, second.microbatches):
        yield from _orders(first, second)


def _stages(first: Pipeline, second: Pipeline) -> Iterator[Row]:
    for number in range(max(len(first.stages), len(second.stages))):
        name = f"stages.{number}"
        if number >= len(second.stages):
            yield "pipeline", name, "presence", "present", None
            continue
        if number >= len(first.stages):
            yield "pipeline", name, "presence", None, "present"
            continue
        one, other = first.stages[number], second.stages[number]
        if one.first != other.first:
            yield "pipeline", name, "begins with", one.first or "the first op", other.first or "the first op"
        if one.rank != other.rank:
            yield "pipeline", name, "rank", str(one.rank), str(other.rank)


def _orders(first: Pipeline, second: Pipeline) -> Iterator[Row]:
    """Of each rank whose actions have another order, the first that differs and how many do."""
    for rank, (one, other) in enumerate(zip(first.schedule, second.schedule, strict=True)):
        if one == other:
            continue
        old, new = one.split(" "), other.split(" ")
        longest = max(len(old), len(new))
        old, new = old + ["nothing"] * (longest - len(old)), new + ["nothing"] * (longest - len(new))
        others = [at for at in range(longest) if old[at] != new[at]]
        at = others[0]
        what = f"action {at} of {longest}" + (f", {len(others)} differ" if len(others) > 1 else "")
        yield "pipeline", f"order of rank {rank}", what, old[at], new[at]

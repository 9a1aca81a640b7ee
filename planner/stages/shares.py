"""What each op and each parameter of a solved problem costs: the objective, split up among those who cause it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..sharding.decisions import Formulation, Reading
from ..sharding.hiding import behind_what, keeps

__all__ = ["Shares", "charged", "shares_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Seconds of one captured op (its compute, and moves of what it reads as far as they are exposed) and, by its name,
    of one parameter's update and the reductions of its gradient, all of a step."""

    ops: Mapping[fx.Node, float]
    steps: Mapping[str, float]

    def total(self, formulation: Formulation) -> float:
        """The objective: every share as often as it stands for one in the whole model."""
        names, blocks = formulation.captured.names, formulation.blocks
        ops = sum(seconds * blocks.share(names[node]) for node, seconds in self.ops.items())
        steps = sum(seconds * blocks.share(name) for name, seconds in self.steps.items())
        return ops + steps / formulation.accumulation.microbatches


def shares_of(formulation: Formulation, choices: Sequence[int]) -> Shares:
    """The shares of a solution. A move that several ops use is the first one's; one between blocks its reader's."""
    captured, decisions, accumulation = formulation.captured, formulation.decisions, formulation.accumulation
    times = accumulation.microbatches * accumulation.share
    ops: dict[fx.Node, float] = defaultdict(float)
    steps: dict[str, float] = defaultdict(float)
    for node in captured.ops():
        if node in formulation.of:
            ops[node] += float(decisions[formulation.of[node]].seconds[choices[formulation.of[node]]])
    for node, source in captured.sources.items():
        if source.kind == "parameter" and node in formulation.of:
            index = formulation.of[node]
            steps[source.name] += float(decisions[index].seconds[choices[index]]) * accumulation.microbatches
    served: set[tuple] = set()
    for reading in formulation.readings:
        if accumulation.once and keeps(decisions[reading.reader]):
            name, start = captured.sources[reading.of].name, reading.source if reading.via is None else reading.via
            steps[name] += _seconds(formulation, choices, reading, start, reading.reader)
            continue
        reader = charged(formulation, reading)
        if reading.via is not None:
            ops[reader] += _seconds(formulation, choices, reading, reading.via, reading.reader)
            shared = (reading.of, reading.output, reading.backward)
            if shared in served:
                continue
            served.add(shared)
            ops[reader] += _seconds(formulation, choices, reading, reading.source, reading.via)
        else:
            ops[reader] += _seconds(formulation, choices, reading, reading.source, reading.reader)
    where = dict(zip(captured.grads, formulation.grads, strict=True))
    for name, reading in where.items():
        once = _seconds(formulation, choices, reading, reading.source, reading.reader, gradient=True)
        steps[name] += times * once
    return Shares(ops=dict(ops), steps=dict(steps))


def charged(formulation: Formulation, reading: Reading) -> fx.Node:
    """The op that a reading is for: of a result, the op that makes it."""
    return reading.node if formulation.decisions[reading.reader].kind == "op" else reading.of


def _seconds(
    formulation: Formulation, choices: Sequence[int], reading: Reading, start: int, end: int, *, gradient: bool = False
) -> float:
    """Exposed seconds of moving a tensor once from decision `start` to decision `end`."""
    decisions = formulation.decisions
    a, b = decisions[start], decisions[end]
    output = reading.output if start == reading.source else 0
    here = a.strategies[choices[start]].outs[output]
    chosen = b.strategies[choices[end]]
    there = chosen.ins[reading.at] if b.kind == "op" else chosen.outs[0]
    table = a.tables[output]
    assert table is not None and here is not None and there is not None
    if here not in table.index or there not in table.index:
        table = formulation.transitions.table(
            reading.of.meta["val"].shape, reading.of.meta["val"].element_size(), extremes=True
        )
    seconds = float(table.seconds[table.index[here], table.index[there]])
    if not (reading.early or (gradient and formulation.accumulation.hides)):
        return seconds
    once = formulation.accumulation.once
    window = behind_what(a, b, decisions[reading.behind], reading, gradient=gradient, once=once)
    row, column = (choices[k] if size > 1 else 0 for k, size in zip((start, end), window.shape, strict=True))
    return max(seconds * formulation.prices.unhidden, seconds - float(window[row, column]))

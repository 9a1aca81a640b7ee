"""The step of a plan on streams: what its collectives really hide behind, simulated over the program's dependences.

The solver prices overlap pair by pair (docs/decisions/0003). Here the same ops and moves are run in the order of the
program: compute on one stream, gathers of parameters started some gathers ahead of their use, reductions of gradients
behind the op that made them, all other moves where they are read. Blocks that a capture left out are run as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ...cost_models.overlap import COMPUTE, Overlap, Piece, overlapped
from ...cost_models.workload import Line
from ...passes.graph import values_of
from ...passes.naming import op_name
from ...plans.errors import RequestError
from ...plans.plan import Plan
from ...plans.words import bytes_words, seconds_words
from ..api import Draft
from ..sharding.formulate import Reading
from ..sharding.own_rules import OpRule
from ..workloads import Writer
from .explain import Given, reopen, same_prices
from .price_notes import primitive_s

__all__ = ["StreamCase", "Streams", "streams_of"]

_AHEAD = 1  # what passes/prefetch.py does
_TOLD = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCase:
    """One run: how many gathers ahead one is started, how many bytes of gradients are joined (0: each by itself)."""

    prefetch: int
    bucket_bytes: int
    step_s: float
    exposed_s: float
    hidden_s: float
    dragged_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """A plan's step by pairs, as it was solved for, and on streams: the first case is how the plan runs. `waits` names
    the ops that wait longest for something to arrive."""

    step_s: float
    exposed_s: float
    hidden_s: float
    cases: tuple[StreamCase, ...]
    waits: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        lines = [f"{'':<32}{'step':>10}{'exposed':>10}{'hidden':>10}{'slowed by':>10}"]
        lines.append(_row("by pairs, as solved", self.step_s, self.exposed_s, self.hidden_s, None))
        for case in self.cases:
            joined = f", {bytes_words(case.bucket_bytes)} joined" if case.bucket_bytes else ""
            lines.append(_row(f"streams, {case.prefetch} ahead{joined}", case.step_s, case.exposed_s, case.hidden_s,
                              case.dragged_s))  # fmt: skip
        if self.waits:
            lines.append("waits longest (all its blocks together):")
            lines += [f"{seconds_words(seconds):>10}  {name}" for name, seconds in self.waits]
        return "\n".join(lines)


def _row(name: str, *seconds: float | None) -> str:
    return f"{name:<32}" + "".join(f"{'-' if s is None else seconds_words(s):>10}" for s in seconds)


def streams_of(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    rules: Sequence[OpRule] = (),
    calibration: Given = None,
    cases: Sequence[tuple[int, int]] = ((_AHEAD, 0), (0, 0), (2, 0), (_AHEAD, 25 << 20)),
) -> Streams:
    """The step of `plan` on streams, for each of the `cases` (gathers ahead, bytes of gradients joined).

    The model, loss, rules and calibration are those that the plan was made with. Raises RequestError for a plan with a
    pipeline and for a case below 0, ReplayError for another model.
    """
    for ahead, bucket in cases:
        if ahead < 0 or bucket < 0:
            raise RequestError(f"'cases' must be numbers of at least 0, got {(ahead, bucket)}; such as (1, 0)")
    same_prices(plan, calibration)
    prepared, found = reopen(plan, model, args, kwargs, loss=loss, rules=rules, calibration=calibration)
    program = _Program(prepared, [found.choices[index] for index in range(len(prepared.formulation.decisions))])
    rows, waits = [], ()
    for at, (ahead, bucket) in enumerate(cases):
        case, run, pieces = program.case(ahead, bucket)
        rows.append(case)
        waits = _waits(run, pieces, prepared) if at == 0 else waits
    told = plan.predicted
    return Streams(step_s=told.step_time_s, exposed_s=told.exposed_communication_s,
                   hidden_s=told.hidden_communication_s, cases=tuple(rows), waits=waits)  # fmt: skip


def _waits(run: Overlap, pieces: Sequence[Piece], prepared: Draft) -> tuple[tuple[str, float], ...]:
    """The ops that begin longest after the compute before them was done, blocks of one kind together."""
    idle: dict[str, float] = {}
    before = 0.0
    for piece, (start, end) in zip(pieces, run.spans, strict=True):
        if piece.stream == COMPUTE:
            name = prepared.blocks.pattern(piece.name)
            idle[name] = idle.get(name, 0.0) + max(0.0, start - before)
            before = end
    longest = sorted(idle.items(), key=lambda item: -item[1])[:_TOLD]
    return tuple((name, seconds) for name, seconds in longest if seconds > 1e-3 * run.makespan_s)


class _Program:
    """The ops and moves of a solved draft, in the order in which they run."""

    def __init__(self, prepared: Draft, choices: list[int]) -> None:
        self.prepared, self.form, self.choices = prepared, prepared.formulation, choices
        captured = prepared.captured
        sizes = {n: [None if v is None else tuple(v.shape) for v in values_of(n)] for n in captured.names}
        self.writer = Writer(prepared, choices, sizes)
        self.before: dict[fx.Node, list[tuple[Reading, Line]]] = {}
        self.behind: dict[fx.Node, list[Line]] = {}
        for reading, move in self.writer.read_moves():
            if move.line.parts or move.line.constant_s:
                self.before.setdefault(reading.node, []).append((reading, move.line))
        for reading in self.form.grads:
            move = self.writer.gradient_move(reading)
            if move.line.parts or move.line.constant_s:
                self.behind.setdefault(reading.of, []).append(move.line)
        self.primitives = list(self.writer.recorder.known)
        self.times = [primitive_s(primitive, self.form.prices) for primitive in self.primitives]
        ops = [n for n in captured.ops() if n in self.form.of and op_name(n) != "getitem"]
        self.halves = [self._unrolled([n for n in ops if (n in captured.backward) == half]) for half in (False, True)]

    def case(self, ahead: int, bucket: int) -> tuple[StreamCase, Overlap, list[Piece]]:
        """The whole step; micro-batches that reduce no gradients run alike."""
        often, prices = self.form.accumulation, self.form.prices
        each = often.reduce == "microbatch" or often.microbatches == 1
        pieces = self._pieces(ahead, bucket, reduce=True)
        run = overlapped(pieces, drag=prices.unhidden)
        others = overlapped(self._pieces(ahead, bucket, reduce=each), drag=prices.unhidden)
        more = often.microbatches - 1
        total = [getattr(run, key) + more * getattr(others, key)
                 for key in ("makespan_s", "exposed_s", "hidden_s", "dragged_s")]  # fmt: skip
        case = StreamCase(prefetch=ahead, bucket_bytes=bucket, step_s=total[0] + self._constant_s(),
                          exposed_s=total[1], hidden_s=total[2], dragged_s=total[3])  # fmt: skip
        return case, run, pieces

    def _constant_s(self) -> float:
        """Seconds of the optimizer and of a step beside its ops."""
        form, blocks = self.form, self.form.blocks
        found = form.prices.step_s
        for node, source in form.captured.sources.items():
            if source.kind == "parameter" and node in form.of:
                index = form.of[node]
                found += float(form.decisions[index].seconds[self.choices[index]]) * blocks.share(source.name)
        return found

    def _unrolled(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Nodes of one half in order, those of a block that stands for others as often as it does."""
        names, blocks = self.form.captured.names, self.form.blocks
        found: list[fx.Node] = []
        at = 0
        while at < len(nodes):
            times, end = blocks.share(names[nodes[at]]), at
            while end < len(nodes) and blocks.share(names[nodes[end]]) == times:
                end += 1
            found += nodes[at:end] * times
            at = end
        return found

    def _pieces(self, ahead: int, bucket: int, *, reduce: bool) -> list[Piece]:
        names, pieces = self.form.captured.names, list[Piece]()
        computed: list[int] = []
        waiting: list[tuple[float, float, str]] = []  # gradients that are not sent yet

        def put(name: str, stream: str, seconds: float, after: Sequence[int], link: str = "") -> int:
            pieces.append(Piece(name=name, stream=stream, seconds=seconds, after=tuple(after), link=link))
            return len(pieces) - 1

        def send(name: str) -> None:
            seconds = sum(s for s, _, _ in waiting) - sum(start for _, start, _ in waiting[1:])
            put(name, "gradients", seconds, computed[-1:], waiting[-1][2])
            waiting.clear()

        for half, nodes in enumerate(self.halves):
            readers, floor, held = [len(computed)] * ahead, len(computed), 0.0
            for node in nodes:
                needs: list[int] = []
                for reading, line in self.before.get(node, ()):
                    seconds, link, _, _ = self._moved(line)
                    if not reading.early:
                        needs.append(put(names[node], "moves", seconds, computed[-1:], link))
                        continue
                    readers.append(len(computed))
                    begin = max(floor, readers[-1 - ahead])
                    after = computed[begin - 1 : begin] if begin else ()
                    needs.append(put(names[node], "gathers", seconds, after, link))
                computed.append(put(names[node], COMPUTE, self._op_s(node), needs))
                for line in self.behind.get(node, ()) if reduce else ():
                    seconds, link, start, size = self._moved(line)
                    if waiting and waiting[-1][2] != link:
                        send(names[node])
                    waiting.append((seconds, start, link))
                    held = size if len(waiting) == 1 else held + size
                    if held >= bucket:
                        send(names[node])
            if half and waiting:
                send("the last gradients")
        return pieces

    def _op_s(self, node: fx.Node) -> float:
        index = self.form.of[node]
        return float(self.form.decisions[index].seconds[self.choices[index]])

    def _moved(self, line: Line) -> tuple[float, str, float, float]:
        """Seconds of a move, the link that it spends most of them on, the start of a collective, and its bytes."""
        seconds, link, longest, start, size = line.constant_s, "", -1.0, 0.0, 0.0
        for at, often in line.parts:
            primitive, taken = self.primitives[at], often * self.times[at]
            seconds += taken
            if primitive.axis >= 0 and taken > longest:
                axis = self.form.prices.axes[primitive.axis]
                longest, size = taken, float(primitive.sizes[0])
                link = (axis.intra if axis.nodes == 1 else axis.inter).name
                start = min(taken, float(self.form.prices.collective_s(primitive.kind, 1, primitive.axis)))
        return seconds, link, start, size

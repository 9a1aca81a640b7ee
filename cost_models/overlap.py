"""Compute and communication on streams: a small simulation over what really waits for what.

Every piece of work belongs to a stream, which runs its own in order, and begins when the pieces that it comes after are
done. Transfers under way on one link at once share its bandwidth. While any transfer runs, compute is slower by `drag`
(a transfer's kernels take units and memory bandwidth). Between two events all rates are constant: times are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plans.errors import RequestError

__all__ = ["COMPUTE", "Overlap", "Piece", "overlapped", "sharded_step"]

COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Work: seconds on its stream when alone, the numbers of pieces that it comes after, the link a transfer uses."""

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """When everything ran. `exposed_s` are seconds in which transfers ran and compute did not, `hidden_s` those in
    which both did, `dragged_s` what compute took longer for it."""

    makespan_s: float
    spans: tuple[tuple[float, float], ...]
    exposed_s: float
    hidden_s: float
    dragged_s: float


def overlapped(pieces: Sequence[Piece], *, drag: float = 0.0) -> Overlap:
    """The run of `pieces`, each stream in the order in which they are given.

    RequestError when pieces wait for each other in a circle.
    """
    queues: dict[str, list[int]] = {}
    for number, piece in enumerate(pieces):
        queues.setdefault(piece.stream, []).append(number)
    orders = list(queues.values())
    heads = [0] * len(orders)
    left = [piece.seconds for piece in pieces]
    done = [False] * len(pieces)
    starts, ends = [-1.0] * len(pieces), [0.0] * len(pieces)
    now = exposed = hidden = dragged = 0.0
    remaining = len(pieces)
    while remaining:
        active: list[tuple[int, int]] = []
        for at, order in enumerate(orders):
            if heads[at] < len(order):
                number = order[heads[at]]
                if all(done[other] for other in pieces[number].after):
                    active.append((at, number))
                    if starts[number] < 0:
                        starts[number] = now
        if not active:
            stuck = next(o[heads[a]] for a, o in enumerate(orders) if heads[a] < len(o))
            name = pieces[stuck].name
            raise RequestError(f"'pieces' must not wait for each other in a circle, got one at {name!r}; reorder")
        rates = _rates([pieces[number] for _, number in active], drag)
        step = min(left[number] / rate for (_, number), rate in zip(active, rates, strict=True))
        busy = any(pieces[number].stream == COMPUTE for _, number in active)
        moving = any(pieces[number].stream != COMPUTE for _, number in active)
        exposed += step if moving and not busy else 0.0
        hidden += step if moving and busy else 0.0
        dragged += step * drag / (1.0 + drag) if moving and busy else 0.0
        now += step
        for (at, number), rate in zip(active, rates, strict=True):
            left[number] -= step * rate
            if left[number] <= 1e-12 * max(1.0, pieces[number].seconds) or left[number] / rate <= 1e-15 * now:
                done[number], ends[number] = True, now
                heads[at] += 1
                remaining -= 1
    return Overlap(makespan_s=now, spans=tuple(zip(starts, ends, strict=True)), exposed_s=exposed, hidden_s=hidden,
                   dragged_s=dragged)  # fmt: skip


def _rates(running: Sequence[Piece], drag: float) -> list[float]:
    """How fast each of the running pieces goes on, against how it would alone."""
    on: dict[str, int] = {}
    for piece in running:
        if piece.stream != COMPUTE:
            on[piece.link] = on.get(piece.link, 0) + 1
    slowed = 1.0 / (1.0 + drag) if on else 1.0
    return [slowed if piece.stream == COMPUTE else 1.0 / on[piece.link] for piece in running]


def sharded_step(
    units: Sequence[Sequence[float]], *, prefetch: int, drag: float, regather: bool, passes: int = 1
) -> Overlap:
    """Forward and backward of `units`, each of (forward, backward, gather, reduce) seconds, `passes` times over.

    Weights are gathered up to `prefetch` units ahead of their use, again in the backward when `regather`; gradients are
    reduced behind the backward of the units before. Gathers and reductions are streams of their own on one link.
    """
    pieces: list[Piece] = []

    def put(name: str, stream: str, seconds: float, after: Sequence[int]) -> int:
        pieces.append(Piece(name=name, stream=stream, seconds=seconds, after=tuple(after), link="data"))
        return len(pieces) - 1

    computed: list[int] = []
    for _ in range(passes):
        for backward in (False, True):
            for unit in reversed(units) if backward else units:
                needs: list[int] = []
                if unit[2] > 0 and (regather or not backward):
                    # A gather is started beside the compute that lies `prefetch` units before its reader.
                    at = max(0, len(computed) - prefetch)
                    needs = [put("gather", "gather", unit[2], computed[at - 1 : at] if at else ())]
                computed.append(put("backward" if backward else "forward", COMPUTE, unit[backward], needs))
                if backward and unit[3] > 0:
                    put("reduce", "reduce", unit[3], computed[-1:])
    return overlapped(pieces, drag=drag)

"""Streams: times by hand, what limits any run, and what prefetch depth, buckets and drag change."""

from __future__ import annotations

import random

import pytest

from meshwright.cost_models.overlap import COMPUTE, Piece, overlapped, sharded_step
from meshwright.plans.errors import RequestError


def _piece(stream: str, seconds: float, *after: int, link: str = "wire") -> Piece:
    return Piece(name=stream, stream=stream, seconds=seconds, after=after, link=link)


def test_times_by_hand() -> None:
    """A transfer of 4 s beside compute of 3 s, then compute that waits for it."""
    run = overlapped([_piece("gather", 4.0), _piece(COMPUTE, 3.0), _piece(COMPUTE, 1.0, 0)])
    assert run.spans == ((0.0, 4.0), (0.0, 3.0), (4.0, 5.0))
    assert (run.makespan_s, run.exposed_s, run.hidden_s, run.dragged_s) == (5.0, 1.0, 3.0, 0.0)


def test_transfers_share_a_link_and_slow_compute() -> None:
    two = [_piece("gather", 1.0), _piece("reduce", 3.0)]
    assert [end for _, end in overlapped(two).spans] == [2.0, 4.0]
    apart = [_piece("gather", 1.0, link="a"), _piece("reduce", 3.0, link="b")]
    assert [end for _, end in overlapped(apart).spans] == [1.0, 3.0]
    run = overlapped([_piece("gather", 1.5), _piece(COMPUTE, 2.0)], drag=0.5)
    assert run.makespan_s == pytest.approx(2.5) and run.dragged_s == pytest.approx(0.5)


def test_pieces_in_a_circle_are_refused() -> None:
    with pytest.raises(RequestError, match="circle"):
        overlapped([_piece(COMPUTE, 1.0, 1), _piece("gather", 1.0, 0)])


def test_any_run_lies_between_its_longest_stream_and_the_sum() -> None:
    draw = random.Random(3)
    for _ in range(60):
        pieces = [_piece(draw.choice((COMPUTE, "gather", "reduce")), draw.choice((0.0, draw.random())),
                         *draw.sample(range(n), min(n, draw.randint(0, 2))), link=draw.choice("ab"))
                  for n in range(draw.randint(1, 25))]  # fmt: skip
        run, drag = overlapped(pieces), overlapped(pieces, drag=0.3)
        total = sum(piece.seconds for piece in pieces)
        longest = max(sum(p.seconds for p in pieces if p.stream == s) for s in (COMPUTE, "gather", "reduce"))
        assert longest - 1e-9 <= run.makespan_s <= total + 1e-9
        assert longest - 1e-9 <= drag.makespan_s <= 1.3 * total + 1e-9
        for piece, (start, end) in zip(pieces, run.spans, strict=True):
            assert end - start >= piece.seconds - 1e-9
            assert all(run.spans[other][1] <= start + 1e-9 for other in piece.after)


def test_prefetch_hides_what_the_step_before_leaves_room_for() -> None:
    layers = [(1.0, 2.0, 0.5, 0.4)] * 6
    steps = [sharded_step(layers, prefetch=ahead, drag=0.0, regather=True).makespan_s for ahead in range(4)]
    assert steps[0] == pytest.approx(18.0 + 12 * 0.5 + 6 * 0.4)  # a reduction shares the link with the next gather
    assert steps[0] > steps[1] >= steps[2] >= steps[3] >= 18.0
    assert steps[1] == pytest.approx(18.0 + 0.5 + 0.4)  # the first gather and the last reduction
    assert sharded_step(layers, prefetch=1, drag=0.2, regather=True).makespan_s > steps[1]
    assert sharded_step(layers, prefetch=1, drag=0.0, regather=False).makespan_s <= steps[1]


def test_more_of_anything_takes_no_less() -> None:
    draw = random.Random(5)
    for _ in range(30):
        units = [tuple(draw.random() for _ in range(4)) for _ in range(draw.randint(1, 6))]
        step = sharded_step(units, prefetch=1, drag=0.1, regather=True).makespan_s
        at, what = draw.randrange(len(units)), draw.randrange(4)
        units[at] = tuple(value + 0.3 * (n == what) for n, value in enumerate(units[at]))
        assert sharded_step(units, prefetch=1, drag=0.1, regather=True).makespan_s >= step - 1e-9

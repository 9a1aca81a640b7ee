"""Shares of a batch, and pieces of unlike replicas."""

from __future__ import annotations

import itertools

import pytest

from meshwright.plans import Mesh, Place, RequestError
from meshwright.plans.migration import Carried, Places, cells_of, migrate
from meshwright.plans.uneven import shared_out


@pytest.mark.parametrize("rates", [(2, 2, 1), (1, 1), (3.0, 0.6), (5, 1, 1, 1)])
@pytest.mark.parametrize("total", [1, 4, 7, 13])
def test_work_is_shared_so_that_the_last_one_ends_first(total: int, rates: tuple[float, ...]) -> None:
    found = shared_out(total, rates)
    assert sum(found) == total
    every = (row for row in itertools.product(range(total + 1), repeat=len(rates)) if sum(row) == total)
    best = min(max(n / rate for n, rate in zip(row, rates, strict=True)) for row in every)
    assert max(n / rate for n, rate in zip(found, rates, strict=True)) == pytest.approx(best)


def test_rates_must_be_above_zero() -> None:
    with pytest.raises(RequestError, match="'rates' must be above 0"):
        shared_out(3, (1.0, 0.0))


def places(width: int, first: int) -> Place:
    return Place(layout=("R", "S(0)"), mesh=Mesh((1, width), ("dp", "tp")), ranks=tuple(range(first, first + width)))


def test_pieces_are_cut_where_any_replica_ends_one() -> None:
    # 10 rows: halves on ranks 0 and 1, 4 + 4 + 2 on ranks 2 to 4, all on rank 5.
    cells, _ = cells_of((10,), Places(parts=(places(2, 0), places(3, 2), places(1, 5))))
    assert cells == {
        ((0, 4),): [0, 2, 5], ((4, 1),): [0, 3, 5], ((5, 3),): [1, 3, 5], ((8, 2),): [1, 4, 5],
    }  # fmt: skip


def test_a_replica_gives_what_another_one_lacks() -> None:
    before, after = Places(parts=(places(2, 0), places(3, 2))), Places(parts=(places(2, 0), places(2, 3)))
    tensor = Carried(name="w", shape=(10,), dtype="float32", before=before, after=after)
    # Rank 2 is lost: its 4 rows come from rank 0.
    found = migrate([tensor], {0, 1, 3, 4})
    assert not found.missing
    moved = [(move.box, move.donor, move.receiver) for move in found.moves if move.donor != move.receiver]
    assert (((0, 4),), 0, 3) in moved
    for rank in (0, 1, 3, 4):
        assert sum(move.box[0][1] for move in found.moves if move.receiver == rank) == 5

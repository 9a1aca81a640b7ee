"""Migrations against a map of every element: who holds it, who should, and what the moves bring."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest

from meshwright.plans import Carried, Mesh, Migration, Place, Plan, RequestError, carried, migrate
from meshwright.plans.migration import Box
from meshwright.plans.plan import Block, Tensor

MESHES = ((1,), (2,), (3,), (4,), (5,), (2, 2), (3, 2), (2, 3), (4, 2), (2, 2, 2), (1, 4))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, start + length) for start, length in box)))


def held(place: Place, shape: tuple[int, ...]) -> dict[int, set[tuple[int, ...]]]:
    """What each rank holds, by asking for every element on which position of every axis it lies."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for rank, coordinate in zip(place.ranks, place.mesh.coordinates(), strict=True):
        mine = {()}
        for dim, size in enumerate(shape):
            index = list(range(size))
            for placement, parts, at in zip(place.layout, place.mesh.shape, coordinate, strict=True):
                if placement == f"S({dim})":
                    full = math.ceil(len(index) / parts)
                    index = index[at * full : (at + 1) * full]
            mine = {(*prefix, i) for prefix in mine for i in index}
        found[rank] = mine
    return found


def a_place(draw: random.Random, dims: int, pool: list[int]) -> Place:
    shape = draw.choice([shape for shape in MESHES if math.prod(shape) <= len(pool)])
    options = ["R", *(f"S({dim})" for dim in range(dims))]
    layout = tuple(draw.choice(options) for _ in shape)
    return Place(layout=layout, mesh=Mesh.of(shape), ranks=tuple(draw.sample(pool, math.prod(shape))))


def a_tensor(draw: random.Random, name: str, pool: list[int], alive: list[int]) -> Carried:
    shape = tuple(draw.choice((0, 1, 2, 3, 5, 6, 7)) for _ in range(draw.randint(0, 3)))
    before, after = a_place(draw, len(shape), pool), a_place(draw, len(shape), alive)
    return Carried(name=name, shape=shape, dtype=draw.choice(("float32", "bfloat16")), before=before, after=after)


@pytest.mark.parametrize("seed", range(150))
def test_every_element_arrives_once_from_one_who_holds_it(seed: int) -> None:
    draw = random.Random(seed)
    pool = list(range(20, 30))
    alive = sorted(draw.sample(pool, draw.randint(1, len(pool))))
    tensors = [a_tensor(draw, f"t{i}", pool, alive) for i in range(3)]
    migration = migrate(tensors, alive)
    total = 0
    for tensor in tensors:
        have, want = held(tensor.before, tensor.shape), held(tensor.after, tensor.shape)
        arrived: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in want}
        width = 4 if tensor.dtype == "float32" else 2
        for move in (move for move in migration.moves if move.name == tensor.name):
            piece = elements(move.box)
            assert piece and move.donor in alive and piece <= have[move.donor]
            # What is held already stays; nothing else does.
            assert move.donor == move.receiver or not piece & have.get(move.receiver, set())
            assert move.size_bytes == width * len(piece)
            arrived[move.receiver].extend(piece)
        for lost in (lost for lost in migration.missing if lost.name == tensor.name):
            piece = elements(lost.box)
            assert piece and not any(piece & have[rank] for rank in have if rank in alive)
            assert lost.size_bytes == width * len(piece)
            arrived[lost.receiver].extend(piece)
        for rank, pieces in arrived.items():
            assert len(pieces) == len(set(pieces)) and set(pieces) == want[rank]
        total += width * sum(len(mine) for mine in want.values())
    assert migration.moved_bytes + migration.kept_bytes + migration.missing_bytes == total
    assert sum(migration.between().values()) == migration.moved_bytes
    assert migrate(tensors, set(reversed(alive))).digest() == migration.digest()
    assert msgspec.json.decode(msgspec.json.encode(migration), type=Migration) == migration


def whole(size: int, ranks: tuple[int, ...]) -> Place:
    return Place(layout=("R",), mesh=Mesh.of((size,)), ranks=ranks)


def test_replicas_share_the_giving_and_the_nearest_gives_first() -> None:
    tensors = [
        Carried(name=f"w{i}", shape=(8,), dtype="float32", before=whole(2, (0, 1)), after=whole(4, (0, 1, 2, 3)))
        for i in range(10)
    ]
    spread = migrate(tensors, range(4))
    given = [sum(size for (donor, _), size in spread.between().items() if donor == rank) for rank in (0, 1)]
    assert given[0] == given[1] == 320
    near = migrate(tensors, range(4), apart=lambda donor, receiver: abs(donor - receiver))
    assert set(near.between()) == {(1, 2), (1, 3)}


def test_what_only_the_dead_held_is_missing() -> None:
    split = Place(layout=("S(0)",), mesh=Mesh.of((4,)), ranks=(0, 1, 2, 3))
    after = Place(layout=("S(0)",), mesh=Mesh.of((3,)), ranks=(0, 1, 3))
    (tensor,) = [Carried(name="w", shape=(10,), dtype="float64", before=split, after=after)]
    migration = migrate([tensor], (0, 1, 3))
    # 10 over 4 is 3, 3, 3, 1; over 3 it is 4, 4, 2.
    assert [(lost.box, lost.receiver, lost.size_bytes) for lost in migration.missing] == [
        (((6, 2),), 1, 16),
        (((8, 1),), 3, 8),
    ]
    assert migration.moved_bytes == 8 and migration.kept_bytes == 48 and migration.missing_bytes == 24


def test_equal_blocks_are_carried_together_and_priced_as_many(sample_plan: Plan) -> None:
    after = msgspec.structs.replace(sample_plan, mesh=Mesh((2, 8), ("dp", "tp")))
    ranks = tuple(range(16))
    found = {tensor.name: tensor for tensor in carried(sample_plan, after, tuple(range(32)), ranks)}
    assert found["model.layers.*.wq.weight"].copies == 6 and "freqs::exp_avg" not in found
    assert {"embed.weight::exp_avg", "embed.weight::exp_avg_sq", "freqs"} <= set(found)
    together = migrate(found.values(), range(32))
    alone = tuple(
        msgspec.structs.replace(tensor, name=tensor.name.replace("*", str(index)))
        for tensor in after.parameters
        for index in range(after.copies(tensor.name))
    )
    singly = migrate(
        carried(sample_plan, msgspec.structs.replace(after, parameters=alone), tuple(range(32)), ranks), range(32)
    )
    assert len(singly.moves) > len(together.moves)
    assert (singly.moved_bytes, singly.kept_bytes) == (together.moved_bytes, together.kept_bytes)


def test_blocks_of_a_run_are_carried_by_their_own_numbers(sample_plan: Plan) -> None:
    """A model whose blocks are two runs in one plan and all alike in the other."""

    def named(pattern: str, count: int) -> tuple[Block, tuple[Tensor, ...]]:
        parameters = [t for t in sample_plan.parameters if "layers.*" in t.name]
        renamed = (msgspec.structs.replace(t, name=t.name.replace("layers.*", pattern)) for t in parameters)
        return Block(pattern=f"model.{pattern}", count=count), tuple(renamed)

    (one, first), (two, second) = named("layers.0-1", 2), named("layers.2-5", 4)
    runs = msgspec.structs.replace(
        sample_plan,
        model=msgspec.structs.replace(sample_plan.model, blocks=(one, two)),
        parameters=(*(t for t in sample_plan.parameters if "layers.*" not in t.name), *first, *second),
    )
    ranks = tuple(range(32))
    found = {tensor.name: tensor.copies for tensor in carried(runs, sample_plan, ranks, ranks)}
    assert {n for n in found if n.endswith(".wq.weight")} == {f"model.layers.{n}.wq.weight" for n in range(6)}
    assert set(found.values()) == {1}
    alike = {tensor.name: tensor.copies for tensor in carried(runs, runs, ranks, ranks)}
    assert alike["model.layers.2-5.wq.weight"] == 4


def test_what_makes_no_sense_is_refused(sample_plan: Plan) -> None:
    with pytest.raises(RequestError, match="one rank for each of the 4 positions"):
        Place(layout=("R",), mesh=Mesh.of((4,)), ranks=(0, 1, 2))
    with pytest.raises(RequestError, match="whole or split placement"):
        Place(layout=("P(sum)",), mesh=Mesh.of((1,)), ranks=(0,))
    tensor = Carried(name="w", shape=(8,), dtype="float32", before=whole(2, (0, 1)), after=whole(2, (0, 2)))
    with pytest.raises(RequestError, match="alive, got \\[2\\] for w"):
        migrate([tensor], (0, 1))
    other = msgspec.structs.replace(sample_plan, parameters=sample_plan.parameters[:1])
    with pytest.raises(RequestError, match="same parameters"):
        list(carried(sample_plan, other, tuple(range(32)), tuple(range(32))))

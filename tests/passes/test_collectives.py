from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import fx

from meshwright.passes import assemble, piece, run_ranks
from meshwright.passes.collectives import Emitter
from meshwright.plans.errors import CheckError, RequestError
from meshwright.plans.layouts import Layout, is_partial
from meshwright.plans.meshes import Mesh
from meshwright.plans.steps import STEP_FORMS, Step

from ..oracle import error_of, term

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
MESHES = [Mesh.of(shape) for shape in [(2,), (3,), (2, 2), (3, 2), (1, 2)]]
SHAPES = [(4, 6), (5, 3), (1, 7), (6, 2, 3), (7,), (0, 4), ()]
OTHERS = [torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.int32]
TRIED = [(mesh, torch.float64) for mesh in MESHES] + [(m, d) for m in (MESHES[1], MESHES[2]) for d in OTHERS]


def emitters(mesh: Mesh) -> list[Emitter]:
    names = [f"axis:{axis}" for axis in range(mesh.ndim)]
    return [Emitter(fx.Graph(), mesh, coordinate, names) for coordinate in mesh.coordinates()]


def value(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.randint(2, tuple(shape), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, generator=generator)
    return torch.randint(100, tuple(shape), dtype=dtype, generator=generator)


def layouts(x: torch.Tensor, mesh: Mesh) -> Iterator[Layout]:
    """Every layout that `x` can lie in: one kind of reduction, and only one that its dtype has."""
    partial = [] if x.dtype == torch.bool else ["P(sum)"] if x.is_complex() else ["P(sum)", "P(max)", "P(min)"]
    for layout in itertools.product(["R", *(f"S({d})" for d in range(x.dim())), *partial], repeat=mesh.ndim):
        if len({p for p in layout if is_partial(p)}) <= 1:
            yield layout


def steps(dims: int, mesh: Mesh, kind: str) -> Iterator[Step]:
    words = [range(dims) if form == "dim" else ("sum", "max", "min") for form in STEP_FORMS[kind]]
    for axis, arguments in itertools.product(mesh.axis_names, itertools.product(*words)):
        yield Step(kind=kind, axis=axis, arguments=arguments)


def run(step: Step, x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Every rank's piece after `step`."""
    ranks = emitters(mesh)
    given = []
    for rank, coordinate in zip(ranks, mesh.coordinates(), strict=True):
        hole = rank.graph.placeholder("x")
        rank.graph.output((rank.step(step, hole, layout, x.to("meta")),))
        given.append([term(x, layout, mesh, coordinate)])
    return [result[0] for result in run_ranks([rank.graph for rank in ranks], given, mesh, {})]


def possible(step: Step, layout: Layout, mesh: Mesh) -> Layout | None:
    try:
        return emitters(mesh)[0].after(step, layout)
    except RequestError:
        return None


@pytest.mark.parametrize(("mesh", "dtype"), TRIED, ids=str)
@pytest.mark.parametrize("kind", STEP_FORMS)
def test_a_step_leads_to_the_pieces_of_its_layout(kind: str, mesh: Mesh, dtype: torch.dtype) -> None:
    tried = 0
    for x in (value(shape, dtype) for shape in SHAPES):
        for layout, step in itertools.product(layouts(x, mesh), steps(x.dim(), mesh, kind)):
            after = possible(step, layout, mesh)
            if after is None or len({p for p in after if is_partial(p)}) > 1:
                continue
            pieces = run(step, x, layout, mesh)
            error = error_of(x, pieces, after, mesh)
            assert error <= (0.05 if dtype == torch.bfloat16 else 1e-12), (str(step), layout, tuple(x.shape))
            tried += 1
    assert tried or (kind in ("all_reduce", "reduce_scatter") and dtype == torch.bool)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_an_all_reduce_by_hand(op: str) -> None:
    mesh = Mesh.of((3,))
    terms = [torch.tensor([1.0, -2.0]), torch.tensor([5.0, 0.0]), torch.tensor([-3.0, 4.0])]
    ranks = emitters(mesh)
    for rank in ranks:
        rank.graph.output((rank.all_reduce(rank.graph.placeholder("x"), op, 0),))
    want = {"sum": [3.0, 2.0], "max": [5.0, 4.0], "min": [-3.0, -2.0]}[op]
    results = run_ranks([rank.graph for rank in ranks], [[t] for t in terms], mesh, {})
    assert [result[0].tolist() for result in results] == [want] * 3


def test_pieces_of_two_axes_on_one_dim_are_pieces_of_pieces() -> None:
    """The earlier axis splits first: 5 is [3, 2], then [2, 1] and [1, 1]."""
    mesh = Mesh.of((2, 2))
    x = torch.arange(5)
    whole = [piece(x, ("S(0)", "S(0)"), mesh, coordinate).tolist() for coordinate in mesh.coordinates()]
    assert whole == [[0, 1], [2], [3], [4]]
    gathered = run(Step(kind="all_gather", axis="tp", arguments=(0,)), x, ("S(0)", "S(0)"), mesh)
    assert [p.tolist() for p in gathered] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]


@pytest.mark.parametrize(
    ("kind", "arguments", "layout"),
    [
        ("all_gather", (0,), ("R", "R")),
        ("all_gather", (0,), ("S(0)", "S(0)")),
        ("all_gather", (0,), ("S(1)", "R")),
        ("slice", (0,), ("S(0)", "R")),
        ("slice", (0,), ("R", "S(0)")),
        ("reduce_scatter", (0,), ("P(max)", "R")),
        ("reduce_scatter", (0,), ("P(sum)", "S(0)")),
        ("all_reduce", ("max",), ("P(sum)", "R")),
        ("all_to_all", (0, 1), ("S(0)", "S(1)")),
        ("keep_first", (), ("P(sum)", "R")),
    ],
)
def test_a_step_that_cannot_start_there_is_refused(kind: str, arguments: tuple, layout: Layout) -> None:
    step = Step(kind=kind, axis="dp", arguments=arguments)
    with pytest.raises(RequestError, match=r"'step' must start from .*, got " + kind):
        emitters(Mesh.of((2, 2)))[0].after(step, layout)


def test_a_step_must_move_something() -> None:
    with pytest.raises(RequestError, match=r"'step' must move its tensor, got all_to_all\(dp, 1, 1\)"):
        emitters(Mesh.of((2,)))[0].after(Step(kind="all_to_all", axis="dp", arguments=(1, 1)), ("S(1)",))


def test_a_step_must_name_an_axis_of_the_mesh() -> None:
    step = Step(kind="keep_first", axis="tp", arguments=())
    with pytest.raises(RequestError, match=r"'step' must name one of the axes \('dp',\), got keep_first\(tp\)"):
        emitters(Mesh.of((2,)))[0].after(step, ("R",))


# What a cluster would hang on


def graphs(*targets: tuple | None) -> list[fx.Graph]:
    """One graph per rank that runs the collective `(target, *arguments)`, or none."""
    made = []
    for target in targets:
        graph = fx.Graph()
        x = graph.placeholder("x")
        if target is not None:
            x = graph.call_function(c10d.wait_tensor.default, (graph.call_function(target[0], (x, *target[1:])),))
        graph.output((x,))
        made.append(graph)
    return made


GATHER = (c10d.all_gather_into_tensor.default, 2, "axis:0")
REDUCE = (c10d.all_reduce.default, "sum", "axis:0")
HIGHEST = (c10d.all_reduce.default, "max", "axis:0")


@pytest.mark.parametrize(("left", "right"), [(GATHER, REDUCE), (REDUCE, HIGHEST)], ids=["kind", "op"])
def test_a_mismatched_collective_is_reported_with_both_ranks(left: tuple, right: tuple) -> None:
    with pytest.raises(CheckError, match=r"must wait for one collective, got .* on rank 0 and .* on rank 1") as error:
        run_ranks(graphs(left, right), [[torch.ones(2)]] * 2, Mesh.of((2,)), {})
    assert "all_reduce('sum', 'axis:0')" in str(error.value)


def test_a_mismatch_within_one_group_of_a_mesh_names_its_ranks() -> None:
    along = (c10d.all_reduce.default, "sum", "axis:1")
    with pytest.raises(CheckError, match=r"on rank 2 and .* on rank 3"):
        run_ranks(graphs(along, along, along, GATHER), [[torch.ones(2)]] * 4, Mesh.of((2, 2)), {})


def test_a_rank_that_ends_while_others_wait_is_reported() -> None:
    with pytest.raises(CheckError, match=r"ranks \[1\] ended while others wait: rank 0 for all_reduce"):
        run_ranks(graphs(REDUCE, None, REDUCE), [[torch.ones(2)]] * 3, Mesh.of((3,)), {})


def test_unequal_pieces_are_reported() -> None:
    with pytest.raises(
        CheckError, match=r"all_reduce over ranks \(0, 1\) must have equal pieces, got .*\(2,\).*\(3,\)"
    ):
        run_ranks(graphs(REDUCE, REDUCE), [[torch.ones(2)], [torch.ones(3)]], Mesh.of((2,)), {})


def test_every_rank_draws_the_numbers_of_one_device() -> None:
    made = []
    for _ in range(3):
        graph = fx.Graph()
        x = graph.placeholder("x")
        drawn = graph.call_function(aten.rand_like.default, (x,))
        summed = graph.call_function(c10d.all_reduce.default, (drawn, "max", "axis:0"))
        graph.output((drawn, summed, graph.call_function(aten.rand_like.default, (x,))))
        made.append(graph)
    torch.manual_seed(3)
    results = run_ranks(made, [[torch.ones(2)]] * 3, Mesh.of((3,)), {})
    after = torch.rand(2)
    torch.manual_seed(3)
    first, second, third = torch.rand(2), torch.rand(2), torch.rand(2)
    for drawn, summed, last in results:
        assert torch.equal(drawn, first)
        assert torch.equal(summed, first)
        assert torch.equal(last, second)
    assert torch.equal(after, third)


# Pieces put together


def test_assemble_is_the_inverse_of_piece() -> None:
    for mesh, shape in itertools.product(MESHES, SHAPES):
        x = value(shape, torch.float64)
        for layout in layouts(x, mesh):
            if not any(map(is_partial, layout)):
                pieces = [piece(x, layout, mesh, coordinate) for coordinate in mesh.coordinates()]
                assert torch.equal(assemble(pieces, x.shape, layout, mesh, "x"), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64], ids=str)
def test_copies_that_differ_are_reported(dtype: torch.dtype) -> None:
    mesh = Mesh.of((2,))
    one, zero = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    with pytest.raises(CheckError, match=r"w must be equal on devices that hold copies of it, got .* at \(1,\)"):
        assemble([one, zero], (3,), ("R",), mesh, "w")


def test_pieces_of_another_shape_and_pending_sums_are_reported() -> None:
    mesh = Mesh.of((2,))
    with pytest.raises(CheckError, match=r"w must have a piece of shape \(2,\) at \(0,\), got \(1,\)"):
        assemble([torch.ones(1), torch.ones(2)], (3,), ("S(0)",), mesh, "w")
    with pytest.raises(CheckError, match=r"w must not be left as a partial sum, got P\(sum\)"):
        assemble([torch.ones(3)] * 2, (3,), ("P(sum)",), mesh, "w")

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from meshwright.passes import capture, op_name
from meshwright.planner.sharding.strategies import Strategies, Strategy, op_key, rule_name, shardable
from meshwright.plans.errors import UnsupportedOpError
from meshwright.plans.layouts import Layout, is_partial
from meshwright.plans.meshes import Mesh


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def node_of(name: str, function: Callable[..., Any], *inputs: torch.Tensor) -> fx.Node:
    """The first node of the op `name` in the captured function."""
    return next(n for n in capture(Function(function), inputs).ops() if op_name(n) == name)


def rows(strategies: list[Strategy]) -> set[tuple[str, ...]]:
    """Outputs, then inputs, of strategies along one axis."""
    return {tuple(layout[0] for layout in (*s.outs, *s.ins) if layout is not None) for s in strategies}


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


ONE, GRID = Mesh.of((2,)), Mesh.of((2, 2))


def test_a_product_can_be_split_along_each_of_its_dims() -> None:
    node = node_of("einsum", lambda x, w: F.linear(x, w), real(4, 6, 8), real(10, 8))
    assert rows(Strategies(ONE).of(node)) >= {
        ("R", "R", "R"),
        ("S(0)", "S(0)", "R"),
        ("S(1)", "S(1)", "R"),
        ("S(2)", "R", "S(0)"),
        ("P(sum)", "S(2)", "S(1)"),
    }


def test_the_replicated_strategy_comes_first_and_none_comes_twice() -> None:
    node = node_of("add", lambda x, y: x + y, real(4, 6), real(6))
    for mesh in (ONE, GRID, Mesh.of((1,)), Mesh.of((2, 2, 2))):
        found = Strategies(mesh).of(node)
        assert found[0] == Strategy((("R",) * mesh.ndim,), (("R",) * mesh.ndim,) * 2)
        assert len(set(found)) == len(found)


def test_an_axis_of_one_device_splits_nothing() -> None:
    node = node_of("relu", torch.relu, real(4, 6))
    assert len(Strategies(Mesh.of((1,))).of(node)) == 1
    along = Strategies(Mesh.of((1, 2))).of(node)
    assert {s.outs[0] for s in along if s.outs[0]} >= {("R", "R"), ("R", "S(0)"), ("R", "S(1)")}
    assert all(s.outs[0] is not None and s.outs[0][0] == "R" for s in along)


def test_strategies_of_a_grid_are_pairs_of_rules() -> None:
    node = node_of("einsum", lambda x, w: F.linear(x, w), real(4, 8), real(8, 8))
    found = {(s.outs[0], *s.ins) for s in Strategies(GRID).of(node)}
    assert (("S(0)", "S(1)"), ("S(0)", "R"), ("R", "S(0)")) in found
    assert (("S(0)", "S(0)"), ("S(0)", "S(0)"), ("R", "R")) in found
    assert (("P(sum)", "S(1)"), ("S(1)", "R"), ("S(1)", "S(0)")) in found


def test_devices_may_be_left_without_elements() -> None:
    """Six rows on four devices are 2, 2, 2 and 0; on many devices fewer than half may be idle."""
    few = rows(Strategies(Mesh.of((4,))).of(node_of("relu", torch.relu, real(6, 2))))
    assert few >= {("S(0)", "S(0)"), ("S(1)", "S(1)")}
    many = rows(Strategies(Mesh.of((16,))).of(node_of("relu", torch.relu, real(40, 8))))
    assert ("S(0)", "S(0)") in many and ("S(1)", "S(1)") not in many


def test_a_kernel_that_refuses_empty_pieces_gets_none() -> None:
    """A maximum of nothing is refused, a sum of nothing is zero."""
    largest = node_of("amax", lambda x: x.amax(0), real(5, 8))
    assert rows(Strategies(Mesh.of((4,))).of(largest)) == {("R", "R"), ("S(0)", "S(1)")}
    assert ("P(max)", "S(0)") in rows(Strategies(Mesh.of((5,))).of(largest))
    total = node_of("sum", lambda x: x.sum(0), real(5, 8))
    assert ("P(sum)", "S(0)") in rows(Strategies(Mesh.of((4,))).of(total))


@pytest.mark.parametrize(
    ("shape", "layout", "mesh", "fits"),
    [
        ((4,), ("S(0)",), (2,), True),
        ((1,), ("S(0)",), (2,), True),  # 1, 0
        ((1, 1), ("S(0)",), (2,), True),
        ((1, 1), ("S(1)",), (2,), False),
        ((1, 7), ("S(0)",), (2,), False),
        ((5,), ("S(0)",), (4,), True),  # 2, 2, 1, 0
        ((9,), ("S(0)",), (16,), True),
        ((8,), ("S(0)",), (16,), False),
        ((8,), ("R", "S(0)"), (2, 16), False),
        ((7,), ("S(0)",), (4,), True),
        ((5,), ("S(0)", "S(0)"), (2, 2), True),  # 3, 2 and 2, 1, 1, 1
        ((3,), ("S(0)", "S(0)"), (2, 2), True),  # 2, 1 and 1, 1, 1, 0
        ((0, 4), ("R",), (2,), True),
        ((0, 4), ("S(1)",), (2,), True),
        ((4,), ("S(1)",), (2,), False),
        ((), ("R", "P(sum)"), (2, 2), True),
    ],
)
def test_shardable(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...], fits: bool) -> None:
    assert shardable(shape, layout, mesh) is fits


def test_what_is_asked_for_may_leave_any_device_without_elements() -> None:
    assert shardable((8,), ("S(0)",), (16,), wide=True) and shardable((1, 7), ("S(0)",), (2,), wide=True)
    assert not shardable((8,), ("S(1)",), (16,), wide=True)
    asked = Strategies(Mesh.of((16,)), wide={(8,), (1, 3)})
    assert asked.of_tensor((8,)) == [("R",), ("S(0)",)]
    assert asked.of_tensor((1, 3)) == [("R",), ("S(0)",), ("S(1)",)]
    assert asked.of_tensor((7,)) == [("R",)]


def test_layouts_of_a_tensor() -> None:
    strategies = Strategies(GRID)
    assert strategies.of_tensor((4, 1)) == [("R", "R"), ("R", "S(0)"), ("S(0)", "R"), ("S(0)", "S(0)")]
    assert strategies.of_tensor((3,)) == [("R", "R"), ("R", "S(0)"), ("S(0)", "R"), ("S(0)", "S(0)")]
    assert strategies.of_tensor((1,)) == strategies.of_tensor((3,))
    assert strategies.of_tensor(()) == [("R", "R")]
    assert ("P(sum)", "S(0)") in strategies.of_tensor((2,), partial=True)
    assert Strategies(Mesh.of((1, 2))).of_tensor((4,)) == [("R", "R"), ("R", "S(0)")]


def test_a_view_that_regroups_wants_even_pieces() -> None:
    def split(size: int, mesh: Mesh) -> set[tuple[str, ...]]:
        return rows(Strategies(mesh).of(node_of("reshape", lambda x: x.view(size, 3, 2) * 2, real(3 * size, 2))))

    assert ("S(0)", "S(0)") in split(4, ONE)
    assert ("S(0)", "S(0)") not in split(5, ONE)  # 15 rows would be cut at 8, within a group of three
    assert ("S(0)", "S(0)") in split(6, Mesh.of((3,)))


def test_a_view_on_two_axes_wants_pieces_even_for_both() -> None:
    def layouts(size: int) -> set[Layout | None]:
        node = node_of("reshape", lambda x: x.view(size, 3) * 2, real(3 * size))
        return {s.outs[0] for s in Strategies(GRID).of(node)}

    assert ("S(0)", "S(0)") in layouts(8)
    assert ("S(0)", "R") in layouts(6)
    assert ("S(0)", "S(0)") not in layouts(6)


def test_no_reduction_is_pending_on_booleans_or_in_two_kinds() -> None:
    node = node_of("amax", lambda x: x.amax((0, 1)), real(4, 6, 8))
    for s in Strategies(GRID).of(node):
        assert len({p for p in s.outs[0] or () if is_partial(p)}) <= 1
    for name, function in {"gt": lambda x: x > 0, "any": lambda x: (x > 0).any(1)}.items():
        for s in Strategies(GRID).of(node_of(name, function, real(4, 6))):
            assert not any(map(is_partial, s.outs[0] or ()))


def test_a_pending_sum_of_reals_is_not_rounded_to_integers() -> None:
    node = node_of("_to_copy", lambda x: x.to(torch.int64), real(4, 6))
    assert ("P(sum)", "P(sum)") not in rows(Strategies(ONE).of(node))
    node = node_of("_to_copy", lambda x: x.to(torch.float64), torch.ones(4, 6, dtype=torch.int64))
    assert ("P(sum)", "P(sum)") in rows(Strategies(ONE).of(node))


def test_random_draws_are_made_whole_by_every_device() -> None:
    node = node_of("bernoulli", lambda x: F.dropout(x, 0.5), real(4, 6))
    assert rows(Strategies(ONE).of(node)) == {("R", "R")}


def test_a_constant_is_made_where_it_is_needed() -> None:
    node = node_of("full", lambda x: x + torch.ones(4, 6), real(4, 6))
    assert rows(Strategies(ONE).of(node)) == {("R",), ("S(0)",), ("S(1)",)}


def test_a_sharded_vocabulary_has_a_local_program_of_its_own() -> None:
    found = Strategies(ONE).of(node_of("embedding", lambda k, w: F.embedding(k, w), torch.arange(6), real(8, 4)))
    assert Strategy((("P(sum)",),), (("S(0)",), ("R",)), "sharded_rows") in found
    found = Strategies(GRID).of(node_of("_log_softmax", lambda x: x.log_softmax(1), real(4, 8)))
    assert Strategy((("S(0)", "S(1)"),), (("S(0)", "S(1)"),), "sharded_softmax") in found


@torch.library.custom_op("meshwright_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_without_a_rule_runs_whole() -> None:
    node = node_of("meshwright_tests.twice", lambda x: twice(x.detach()), real(4, 6))
    assert Strategies(ONE).of(node) == [Strategy((("R",),), (("R",),), "whole")]
    assert Strategies(GRID).of(node) == [Strategy((("R", "R"),), (("R", "R"),), "whole")]


def test_an_op_may_be_kept_whole() -> None:
    node = node_of("relu", lambda x: x.relu(), real(4, 6))
    assert Strategies(ONE, replicate=["relu"]).of(node) == [Strategy((("R",),), (("R",),), "whole")]


def test_an_op_that_communicates_is_refused() -> None:
    summed = torch.ops._c10d_functional.all_reduce
    node = node_of("_c10d_functional.all_reduce", lambda x: summed(x.detach(), "sum", "0"), real(4, 6))
    with pytest.raises(UnsupportedOpError, match=r"must not communicate by itself, got _c10d_functional::all_reduce"):
        Strategies(ONE).of(node, "layers.0::all_reduce.0")


def test_equal_ops_are_worked_out_once() -> None:
    captured = capture(Function(lambda x, y: (x.relu(), y.relu(), x.T.relu())), (real(4, 6), real(4, 6)))
    first, second, third = (n for n in captured.ops() if op_name(n) == "relu")
    strategies = Strategies(ONE)
    assert op_key(first) == op_key(second) != op_key(third)
    assert strategies.of(first) is strategies.of(second)
    assert strategies.of(first) is not strategies.of(third)


@pytest.mark.parametrize(
    ("name", "function", "entry"),
    [
        ("max", lambda x: x.max(1)[0], "max.dim"),
        ("max", lambda x: x.max(), "max.default"),
        ("sum", lambda x: x.sum(1), "sum"),
        ("relu", torch.relu, None),
    ],
)
def test_own_rules_are_found_by_overload_first(name: str, function: Callable[..., Any], entry: str | None) -> None:
    assert rule_name(node_of(name, function, real(4, 6))) == entry


def test_a_threshold_is_no_monotonic_function() -> None:
    """DTensor says so; it is wrong where the value is above the threshold."""
    node = node_of("threshold", lambda x: F.threshold(x, 0.1, 2.0), real(4, 6))
    assert not [row for row in rows(Strategies(ONE).of(node)) if any(map(is_partial, row))]


def test_complex_numbers_have_no_maximum() -> None:
    node = node_of("sgn", torch.sgn, torch.randn(4, 6, dtype=torch.complex64))
    assert not [row for row in rows(Strategies(ONE).of(node)) if "P(max)" in row or "P(min)" in row]

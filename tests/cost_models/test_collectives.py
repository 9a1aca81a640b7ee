"""Collective times: monotonicity, groups of one, bus bandwidths, and arrays against numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models.collectives import KINDS, axis_collective_s, collective_s
from meshwright.cost_models.devices import device_names, load_device
from meshwright.cost_models.links import AxisLink
from meshwright.plans.errors import RequestError

_GIB = 2**30


def _axis(name: str, nodes: int, members: int) -> AxisLink:
    device = load_device(name)
    return AxisLink(group_size=nodes * members, nodes=nodes, members_per_node=members,
                    intra=device.intra_link, inter=device.nic)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", device_names())
def test_group_of_one_and_no_bytes_cost_nothing(kind: str, name: str) -> None:
    link = load_device(name).intra_link
    assert collective_s(kind, _GIB, group_size=1, link=link) == 0.0
    assert collective_s(kind, 0, group_size=8, link=link) == 0.0
    assert np.all(collective_s(kind, np.array([1.0, 2.0]), group_size=1, link=link) == 0.0)


@given(
    kind=st.sampled_from(KINDS), name=st.sampled_from(["h100-sxm", "a100-sxm", "cpu"]), size=st.integers(1, 2**36),
    more=st.integers(1, 2**34), nodes=st.integers(1, 64), members=st.integers(1, 8),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_more_bytes_or_members_are_never_cheaper(
    kind: str, name: str, size: int, more: int, nodes: int, members: int
) -> None:
    axis = _axis(name, nodes, members)
    seconds = axis_collective_s(kind, size, axis)
    assert axis_collective_s(kind, size + more, axis) >= seconds
    if kind == "all_to_all":  # the whole tensor is fixed: compare at the same bytes per device instead
        if nodes == 1:
            grown = _axis(name, nodes, members + 1)
            before = axis_collective_s(kind, size * members, axis)
            assert axis_collective_s(kind, size * grown.group_size, grown) >= before
    elif nodes == 1:
        assert axis_collective_s(kind, size, _axis(name, nodes, members + 1)) >= seconds
    else:
        assert axis_collective_s(kind, size, _axis(name, nodes + 1, members)) >= seconds * (1 - 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "members"), [(1, 8), (8, 1), (8, 8)])
def test_arrays_agree_with_numbers(kind: str, nodes: int, members: int) -> None:
    axis, sizes = _axis("h100-sxm", nodes, members), np.array([1, 2**10, 2**20, 2**30])
    rows = [axis_collective_s(kind, int(size), axis) for size in sizes]
    np.testing.assert_allclose(axis_collective_s(kind, sizes, axis), rows, rtol=1e-12)
    assert isinstance(rows[0], float)


@pytest.mark.parametrize(
    ("name", "size", "low", "high"),
    [  # all_reduce bus bandwidth on 8 devices, github:stas00/ml-engineering network/README.md @744d01e, +-10 %
        ("h200-sxm", 8 * _GIB, 430e9, 530e9),
        ("h100-sxm", _GIB, 400e9, 500e9),
        ("a100-sxm", _GIB, 206e9, 252e9),
        ("b200-sxm", _GIB, 650e9, 796e9),
        ("mi300x", 4 * _GIB, 281e9, 344e9),
    ],
)
def test_all_reduce_bus_bandwidth_in_a_node(name: str, size: int, low: float, high: float) -> None:
    assert low < 1.75 * size / axis_collective_s("all_reduce", size, _axis(name, 1, 8)) < high


@pytest.mark.parametrize(("name", "busbw"), [("h200-sxm", 364.87e9), ("b200-sxm", 377.34e9)])
def test_all_reduce_bus_bandwidth_over_four_nodes(name: str, busbw: float) -> None:
    seconds = axis_collective_s("all_reduce", 4 * _GIB, _axis(name, 4, 8))
    assert 2 * 31 / 32 * 4 * _GIB / seconds == pytest.approx(busbw, rel=0.1)


def test_cross_node_group_of_64_lies_between_its_two_levels() -> None:
    """With eight wires per node a hierarchical group beats one member per node, and never beats one node alone."""
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        both = axis_collective_s(kind, _GIB, _axis("h100-sxm", 8, 8))
        assert axis_collective_s(kind, _GIB, _axis("h100-sxm", 1, 8)) < both
        assert both < axis_collective_s(kind, _GIB, _axis("h100-sxm", 8, 1)) / 4
        assert 1e-3 < both < 20e-3


def test_small_collectives_pay_latency_not_bandwidth() -> None:
    tiny = collective_s("all_reduce", 8, group_size=8, link=load_device("h100-sxm").intra_link)
    assert tiny == pytest.approx(31e-6, rel=0.3)  # fitted constant of meta-pytorch/autoparallel
    rack = collective_s("all_reduce", 8, group_size=72, link=load_device("gb200").intra_link)
    assert tiny < rack < 4 * tiny  # a tree, not 142 ring steps


def test_switch_reduction_helps_from_four_devices_on() -> None:
    device = load_device("h100-sxm")
    ring = load_device("a100-sxm").intra_link
    assert device.intra_link.switch_reduce_efficiency > 0 and ring.switch_reduce_efficiency == 0
    four = collective_s("all_reduce", _GIB, group_size=4, link=device.intra_link)
    eight = collective_s("all_reduce", _GIB, group_size=8, link=device.intra_link)
    assert eight == pytest.approx(four, rel=0.02)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(RequestError, match="all_gather"):
        collective_s("allgather", 1, group_size=2, link=load_device("cpu").intra_link)

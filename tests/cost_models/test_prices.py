"""Prices: the planner's single interface agrees with the parts and refuses what does not fit."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from meshwright.cost_models import __all__ as face
from meshwright.cost_models import collectives, kernels
from meshwright.cost_models.devices import load_device
from meshwright.cost_models.prices import Prices
from meshwright.plans.clusters import Cluster
from meshwright.plans.errors import RequestError
from meshwright.plans.meshes import Mesh


def _prices(cluster: str = "h100-sxm:8x8", mesh: str = "8x8", **options: bool) -> Prices:
    return Prices.of(Cluster.parse(cluster), Mesh.parse(mesh), compiled=options.get("compiled", True))


def test_prices_agree_with_the_parts() -> None:
    prices, device = _prices(), load_device("h100-sxm")
    sizes = np.array([1e3, 1e6, 1e9])
    alone = kernels.gemm_s(device, 512, 512, 512, batch=4)
    assert prices.gemm_s(512, 512, 512, 4) == alone * device.gemm.sustained_slowdown > alone
    assert prices.attention_s(1, 8, 512, 512, 128, causal=False) == kernels.attention_s(
        device, 1, 8, 512, 512, 128, causal=False
    )
    np.testing.assert_array_equal(prices.memory_s(sizes), kernels.memory_s(device, sizes))
    inside = collectives.collective_s("all_gather", sizes, group_size=8, link=device.intra_link)
    np.testing.assert_array_equal(prices.collective_s("all_gather", sizes, 1), inside)
    across = prices.collective_s("all_gather", sizes, 0)
    assert isinstance(across, np.ndarray) and np.all(across > inside)


def test_compiled_programs_pay_less_for_launches() -> None:
    assert 0 < _prices(compiled=True).launch_s < _prices(compiled=False).launch_s


def test_capacity_leaves_out_the_framework_unless_given() -> None:
    device = load_device("h100-sxm")
    assert _prices().capacity_bytes == device.memory_bytes - device.framework_constant_bytes
    small = Cluster(device="h100-sxm", nodes=1, devices_per_node=8, memory_bytes=10**9)
    assert Prices.of(small, Mesh.parse("8"), compiled=True).capacity_bytes == 10**9


def test_source_names_the_sheet() -> None:
    assert _prices().source == "datasheet h100-sxm v1"
    slow = dataclasses.replace(load_device("h100-sxm"), name="ours", memory_efficiency=0.5)
    prices = Prices.of(Cluster.parse("h100-sxm:8"), Mesh.parse("8"), compiled=True, device=slow)
    assert prices.source == "device ours v1" and prices.memory_s(1e9) > _prices().memory_s(1e9)


def test_attention_kernel_can_be_chosen() -> None:
    cluster, mesh = Cluster.parse("h100-sxm:8"), Mesh.parse("8")
    flash2 = Prices.of(cluster, mesh, compiled=True, attention="flash2")
    assert flash2.attention_s(4, 16, 4096, 4096, 128) > _prices().attention_s(4, 16, 4096, 4096, 128)
    with pytest.raises(RequestError, match="attention"):
        Prices.of(cluster, mesh, compiled=True, attention="flash9")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestError, match="one rank per device"):
        _prices("h100-sxm:4x8", "8x8")
    with pytest.raises(RequestError, match="near names"):
        _prices("h101-sxm:8x8")
    for axis in (-1, 2):
        with pytest.raises(RequestError, match="axis"):
            _prices().collective_s("all_reduce", 1, axis)


def test_prices_are_values() -> None:
    prices = _prices()
    assert prices == _prices() and hash(prices) == hash(_prices())
    assert pickle.loads(pickle.dumps(prices)) == prices


def test_face_names_exist() -> None:
    import meshwright.cost_models as room

    assert len(set(face)) == len(face) and all(hasattr(room, name) for name in face)

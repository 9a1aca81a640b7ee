"""Which links the groups along a mesh axis cross."""

from __future__ import annotations

import pytest

from meshwright.cost_models.devices import load_device
from meshwright.cost_models.links import AxisLink, _spread, axis_link, cluster_links
from meshwright.plans.clusters import Cluster, Link
from meshwright.plans.errors import RequestError
from meshwright.plans.meshes import Mesh


@pytest.mark.parametrize(
    ("cluster", "mesh", "kinds"),
    [
        ("h100-sxm:8x8", "8x8", [("inter", 8, 1), ("intra", 1, 8)]),
        ("h100-sxm:8x8", "64", [("hierarchical", 8, 8)]),
        ("h100-sxm:2x8", "4x4", [("hierarchical", 2, 2), ("intra", 1, 4)]),
        ("h100-sxm:4x8", "2x16", [("inter", 2, 1), ("hierarchical", 2, 8)]),
        ("h100-sxm:4x8", "2x2x8", [("inter", 2, 1), ("inter", 2, 1), ("intra", 1, 8)]),
        ("h100-sxm:8", "1x8", [("none", 1, 1), ("intra", 1, 8)]),
        ("h100-sxm:3x8", "4x6", [("inter", 3, 1), ("hierarchical", 2, 2)]),
    ],
)
def test_axis_links(cluster: str, mesh: str, kinds: list[tuple[str, int, int]]) -> None:
    grid = Mesh.parse(mesh)
    links = [axis_link(Cluster.parse(cluster), grid, axis) for axis in range(grid.ndim)]
    assert [(link.kind, link.nodes, link.members_per_node) for link in links] == kinds
    assert [link.group_size for link in links] == list(grid.shape)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 3, 4), (3, 8)])
@pytest.mark.parametrize("per_node", [1, 2, 4, 8, 24])
def test_spread_agrees_with_counting_each_group(shape: tuple[int, ...], per_node: int) -> None:
    mesh = Mesh.of(shape)
    for axis in range(mesh.ndim):
        counts = []
        for coordinate in mesh.coordinates():
            nodes = [rank // per_node for rank in mesh.group(axis, coordinate)]
            counts.append((len(set(nodes)), min(nodes.count(node) for node in nodes)))
        widest = max(spanned for spanned, _ in counts)
        assert _spread(mesh, axis, per_node) == (widest, min(fewest for spanned, fewest in counts if spanned == widest))


def test_mesh_and_cluster_of_unlike_size_are_refused() -> None:
    for mesh in ("8x16", "4x8"):
        with pytest.raises(RequestError, match="one rank per device"):
            axis_link(Cluster.parse("h100-sxm:8x8"), Mesh.parse(mesh), 0)
    with pytest.raises(RequestError, match="axis"):
        axis_link(Cluster.parse("h100-sxm:8"), Mesh.parse("8"), 1)


def test_links_of_the_cluster_replace_the_sheet() -> None:
    links = (
        Link(name="intra_node", bandwidth_bytes_per_s=1e11, latency_s=2e-6),
        Link(name="inter_node", bandwidth_bytes_per_s=1e9, latency_s=9e-6),
    )
    cluster = Cluster(device="v100-sxm", nodes=2, devices_per_node=8, links=links)
    intra, nic = cluster_links(cluster, load_device("v100-sxm"))
    assert (intra.bandwidth_bytes_per_s, intra.latency_s) == (1e11, 2e-6)
    assert (nic.bandwidth_bytes_per_s, nic.latency_s, nic.devices_per_link) == (1e9, 9e-6, 1)


def test_unknown_link_name_is_refused() -> None:
    links = (Link(name="carrier-pigeon", bandwidth_bytes_per_s=1.0, latency_s=1.0),)
    with pytest.raises(RequestError, match="carrier-pigeon"):
        cluster_links(Cluster(device="cpu", nodes=1, devices_per_node=2, links=links), load_device("cpu"))


def test_shared_nic_is_counted() -> None:
    nic = load_device("v100-sxm").nic
    assert nic.devices_per_link == 2
    assert nic.rate_bytes_per_s == pytest.approx(nic.bandwidth_bytes_per_s * nic.efficiency / 2)


def test_impossible_axis_link_is_refused() -> None:
    link = load_device("cpu").intra_link
    with pytest.raises(RequestError, match="group_size"):
        AxisLink(group_size=2, nodes=3, intra=link, inter=link)

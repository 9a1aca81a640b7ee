"""Which links the groups along a mesh axis cross."""

from __future__ import annotations

import pytest

from meshwright.cost_models.collectives import axis_collective_s
from meshwright.cost_models.devices import load_device
from meshwright.cost_models.fabrics import fabric_levels, fabric_names
from meshwright.cost_models.links import AxisLink, _spread, axis_link, cluster_links, torus_link
from meshwright.plans.clusters import Cluster, Level, Link
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


def test_levels_above_the_nodes_are_crossed_by_what_spans_them() -> None:
    """A data-parallel axis of 64 nodes under leaves of 16 that carry half of what they could: rings have 16 nodes
    inside, which hides it; an all-to-all and pairs of neighbours far apart do not."""
    levels = (Level(name="leaf", nodes=16, oversubscription=8.0, latency_s=1e-6),)
    flat, over = (Cluster("h100-sxm", 64, 8, fabric=fabric) for fabric in (None, levels))
    mesh = Mesh.parse("64x8")
    plain, crossed = (axis_link(cluster, mesh, 0) for cluster in (flat, over))
    assert not plain.tiers and [tier.spans for tier in crossed.tiers] == [4]
    size = float(1 << 36)
    for kind, ratio in (("all_reduce", 1.0), ("all_to_all", 8 * 48 / 63)):
        slower = axis_collective_s(kind, size, crossed) / axis_collective_s(kind, size, plain)
        assert slower == pytest.approx(ratio, rel=0.05), kind
    assert not axis_link(over, mesh, 1).tiers  # inside nodes
    far = Mesh.parse("4x128")  # one node of each leaf: every ring crosses on each hop
    pair = [axis_collective_s("all_reduce", size, axis_link(cluster, far, 0)) for cluster in (flat, over)]
    assert pair[1] / pair[0] == pytest.approx(8.0, rel=0.05)


def test_known_fabrics_have_sources_and_unknown_ones_are_refused() -> None:
    for name in fabric_names():
        levels, source = fabric_levels(Cluster("h100-sxm", 4, 8, fabric=name))
        assert source and (name == "flat") == (not levels)
    with pytest.raises(RequestError, match="llama3-roce"):
        axis_link(Cluster("h100-sxm", 4, 8, fabric="llama3"), Mesh.parse("32"), 0)
    with pytest.raises(RequestError, match="whole ones below"):
        Cluster("h100-sxm", 4, 8, fabric=(Level(name="a", nodes=4, oversubscription=1.0),
                                          Level(name="b", nodes=6, oversubscription=1.0)))  # fmt: skip


def test_groups_on_a_torus_have_the_wires_of_the_dims_they_go_round() -> None:
    link = load_device("tpu-v5p").intra_link
    whole = link.bandwidth_bytes_per_s
    for size, stride, share in ((4, 1, 1 / 3), (16, 1, 2 / 3), (64, 1, 1.0), (4, 4, 1 / 3), (2, 1, 1 / 6)):
        assert torus_link(link, 64, size, stride).bandwidth_bytes_per_s == pytest.approx(whole * share), (size, stride)
    open_ends = torus_link(load_device("tpu-v5e").intra_link, 64, 8, 1)  # 8x8 of a pod of 16x16: a line
    assert open_ends.bandwidth_bytes_per_s == pytest.approx(load_device("tpu-v5e").intra_link.bandwidth_bytes_per_s / 4)

"""Clusters from text, files and the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.plans import Cluster, Link, RequestError

TOML = """
device = "h100-sxm"
nodes = 16
devices_per_node = 8
memory_bytes = 80_000_000_000

[[links]]
name = "nvlink"
bandwidth_bytes_per_s = 450e9
latency_s = 2e-6

[[links]]
name = "infiniband"
bandwidth_bytes_per_s = 50e9
latency_s = 5e-6
"""


def test_text() -> None:
    cluster = Cluster.parse("h100-sxm:16x8")
    assert (cluster.device, cluster.nodes, cluster.devices_per_node, cluster.size) == ("h100-sxm", 16, 8, 128)
    assert Cluster.parse("h100-sxm:8") == Cluster(device="h100-sxm", nodes=1, devices_per_node=8)
    assert str(cluster) == "h100-sxm:16x8" and str(Cluster.parse("cpu:1x4")) == "cpu:4"


def test_files_and_str_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    cluster = Cluster.parse(str(path))
    assert cluster.links is not None and [link.name for link in cluster.links] == ["nvlink", "infiniband"]
    assert cluster.memory_bytes == 80_000_000_000 and cluster.size == 128
    assert Cluster.parse(str(cluster)) == cluster
    other = tmp_path / "cluster.json"
    other.write_text(str(cluster))
    assert Cluster.parse(str(other)) == cluster


@pytest.mark.parametrize(
    "text",
    ["", "h100", "h100:", "h100:0", "h100:0x8", "h100:8x0", "h100:-1", "h100:1x2x3", "H100:8", ":8", "h100:8 ",
     "h100:٣", "h100:9999999x8", "h100:999999x99999", "{", "{}", '{"device":"a"}', "no.toml", "no.json",
     "a\0.toml", "[" * 9999, "{" * 9999, '{"device":"a","nodes":1,"devices_per_node":1,"x":1}', "\ud800", "{\ud800"],
)  # fmt: skip
def test_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cluster.* must .*, got "):
        Cluster.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "device = 3", TOML + "x = 1", TOML.replace("450e9", "-1.0"), TOML.replace("450e9", "nan"),
     TOML.replace("450e9", "inf"), TOML.replace("infiniband", "nvlink"), TOML.replace("16", "true"),
     TOML.replace("16", "0"), "a = " + "[" * 5000, "device = 1979-05-27", "a = 1\na = 2", "\ud800"],
)  # fmt: skip
def test_wrong_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RequestError, match="cluster.* must .*, got"):
        Cluster.parse(str(path))


def test_what_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "long.json").write_bytes(b" " * (2 << 20))
    for name in ("pipe.toml", "folder.toml", "long.json"):
        with pytest.raises(RequestError, match="cluster"):
            Cluster.parse(str(tmp_path / name))


@pytest.mark.parametrize(
    "change",
    [{"device": "A"}, {"device": 1}, {"nodes": 0}, {"nodes": True}, {"nodes": 1.5}, {"devices_per_node": -1},
     {"links": ()}, {"links": ("x",)}, {"links": 3}, {"memory_bytes": 0}, {"memory_bytes": 1.0}, {"nodes": 999_999}],
)  # fmt: skip
def test_wrong_values_are_refused(change: dict[str, Any]) -> None:
    values: dict[str, Any] = {"device": "cpu", "nodes": 1, "devices_per_node": 8} | change
    with pytest.raises(RequestError, match="must"):
        Cluster(**values)


def test_wrong_links_are_refused() -> None:
    for bandwidth, latency in ((0.0, 0.0), (float("nan"), 0.0), (1e9, -1.0), (1e9, float("inf"))):
        with pytest.raises(RequestError, match="must"):
            Link(name="x", bandwidth_bytes_per_s=bandwidth, latency_s=latency)


def test_local(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Cluster.local() == Cluster(device="cpu", nodes=1, devices_per_node=os.cpu_count() or 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Cluster.local().size == 4
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(RequestError, match="WORLD_SIZE"):
        Cluster.local()

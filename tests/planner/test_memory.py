"""Predicted memory against what a rank really allocates (benchmarks/rank_memory.py), and limits that it keeps."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from meshwright.passes.capture import capture
from meshwright.planner.api import draft, plan
from meshwright.planner.checking.verify import random_plan
from meshwright.planner.fitting import solve_within
from meshwright.planner.sharding.folding import Blocks
from meshwright.planner.sharding.memory import counted
from meshwright.plans.clusters import Cluster
from meshwright.plans.errors import Infeasible, RequestError
from meshwright.specs import load_spec

TOOL = Path(__file__).parent.parent.parent / "benchmarks" / "rank_memory.py"


@cache
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_memory", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("spec", "mesh", "recompute", "optimizer"),
    [
        pytest.param("gpt2-tiny", "3", "none", "adamw", marks=pytest.mark.slow),
        ("vit-tiny", "2", "block", "sgd-momentum"),
        pytest.param("llama-tiny", "2x2", "pointwise", "adamw", marks=pytest.mark.slow),
        pytest.param("mixtral-tiny", "2", "block", "sgd", marks=pytest.mark.slow),
        pytest.param("qwen3-tiny", "2x2", "none", "adamw", marks=pytest.mark.slow),
    ],
)
def test_predicted_memory_is_what_a_rank_allocates(spec: str, mesh: str, recompute: str, optimizer: str) -> None:
    """The chosen plan and a random one, on the first and the last rank; pieces are uneven on three ranks."""
    model, args, kwargs = load_spec(spec, layers=1).build()
    devices = eval(mesh.replace("x", "*"))
    prepared = draft(
        model, args, kwargs, cluster=f"cpu:{devices}", mesh=mesh, recompute=recompute, optimizer=optimizer,
        compiled=False,
    )  # type: ignore[arg-type]  # fmt: skip
    for each in (prepared.write(solve_within(prepared, time_limit_s=10)), random_plan(prepared, 1)):
        ranks = (0, devices - 1)
        real = max(tool().measure("counted", model, prepared.captured, each, rank=rank) for rank in ranks)
        memory = each.predicted.memory
        assert real <= 1.02 * memory.peak_bytes and memory.peak_bytes <= 1.15 * real
        assert sum(getattr(memory, f) for f in memory.__struct_fields__[:-2]) == memory.peak_bytes


def test_the_tool_counts_what_the_allocator_gives() -> None:
    model, args, kwargs = load_spec("vit-tiny", layers=1).build()
    prepared = draft(model, args, kwargs, cluster="cpu:2", mesh="2", compiled=False)
    each = random_plan(prepared, 2)
    with_data = tool().measure("counted", model, prepared.captured, each)
    without = tool().measure("counted", model, prepared.captured, each, waits=False)
    # A group without data lets go of what a collective reads at once.
    assert tool().measure("profiled", model, prepared.captured, each) == without <= with_data


@pytest.mark.parametrize("seed", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_blocks_that_were_left_out_count(seed: int) -> None:
    model, args, kwargs = load_spec("gpt2-tiny", layers=5).build()
    prepared = draft(model, args, kwargs, cluster="cpu:2", mesh="2", compiled=False, recompute="block")
    each = random_plan(prepared, seed)
    whole = counted(capture(model, args, kwargs, recompute="block"), each, Blocks(), None).memory
    assert prepared.blocks.cut and each.predicted.memory.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.03)


class Chain(nn.Module):
    """Six square layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


@pytest.mark.parametrize("small", [0, 1])
def test_pipeline_ranks_fill_their_own_devices(small: int) -> None:
    """A device with little memory gets few layers; the smaller limit on both leaves no plan."""
    sizes = (2_500_000, 8_000_000) if small == 0 else (8_000_000, 2_500_000)
    cluster = Cluster(device="cpu", nodes=1, devices_per_node=2, memory_bytes=sizes)
    request = dict(mesh="1", pipeline=2, microbatches=2, recompute="none", time_limit_s=2)
    with torch.device("meta"):
        model, args = Chain(), (torch.empty(16, 256),)
    found = plan(model, args, cluster=cluster, **request)  # type: ignore[arg-type]
    assert found.pipeline is not None
    held = [0, 0]
    for stage in found.pipeline.stages:
        assert stage.cost is not None
        held[stage.rank] += stage.cost.held_bytes
    assert held[small] < min(sizes) < held[1 - small] < max(sizes)
    memory = found.predicted.memory
    assert memory.limit_bytes == max(sizes) and memory.peak_bytes <= max(sizes)
    with pytest.raises(Infeasible):
        plan(model, args, cluster=cluster, memory_limit_bytes=min(sizes), **request)  # type: ignore[arg-type]


def test_the_smallest_device_binds() -> None:
    model, args, kwargs = load_spec("vit-tiny", layers=1).build()
    sizes = (2**33, 2**30, 2**32)
    cluster = Cluster(device="cpu", nodes=1, devices_per_node=3, memory_bytes=sizes)
    assert Cluster.parse(str(cluster)) == cluster
    prepared = draft(model, args, kwargs, cluster=cluster, mesh="3", compiled=False)
    assert prepared.limit == 2**30
    with pytest.raises(RequestError, match="for each of the 2"):
        Cluster(device="cpu", nodes=1, devices_per_node=2, memory_bytes=sizes)

"""A small sound plan for the tests of this room."""

from __future__ import annotations

import pytest

from meshwright.plans import (
    Block,
    Cluster,
    Edge,
    Link,
    Memory,
    Mesh,
    Model,
    Node,
    Options,
    Plan,
    Predicted,
    Solver,
    Tensor,
)
from meshwright.plans.plan import DynamicDim


@pytest.fixture
def sample_plan() -> Plan:
    """A plan of a two-kind model on 4 nodes of 8, with a stamped block, a special rule and several steps."""
    link = Link(name="nvlink", bandwidth_bytes_per_s=4.5e11, latency_s=2e-6)
    return Plan(
        meshwright_version="0.1.0",
        torch_version="2.13.0",
        model=_model(),
        cluster=Cluster(device="h100-sxm", nodes=4, devices_per_node=8, links=(link,), memory_bytes=80 * 2**30),
        mesh=Mesh((4, 8), ("dp", "tp")),
        parameters=(
            _tensor("embed.weight", (1000, 64), ("R", "S(0)")),
            _tensor("model.layers.*.wq.weight", (64, 64), ("S(1)", "S(0)")),
        ),
        buffers=(_tensor("freqs", (16,), ("R", "R")),),
        inputs=(Tensor(name="args.0", shape=(8, 16), dtype="int64", layout=("S(0)", "R")),),
        outputs=(_tensor("output", (8, 16, 64), ("S(0)", "P(sum)")),),
        nodes=_nodes(),
        options=Options(
            optimizer="adamw",
            compiled=True,
            recompute="pointwise",
            prefetch=True,
            memory_limit_bytes=None,
            constraints=("embed: tp",),
            recipe="",
            seed=0,
            dynamic=(DynamicDim(input="args.0", dim=0, symbol="batch", smallest=2, largest=None, step=1),),
        ),
        predicted=_predicted(),
        solver=Solver(status="optimal", objective_s=0.9, bound_s=0.9, gap=0.0, seconds=1.5, choices=321),
        calibration="sheet h100-sxm",
    )


def _model() -> Model:
    blocks = (Block(pattern="model.layers.*", count=6),)
    return Model(name="tiny", digest="0123456789abcdef" * 4, parameters=88576, parameter_bytes=354304, blocks=blocks)


def _tensor(name: str, shape: tuple[int, ...], layout: tuple[str, ...]) -> Tensor:
    return Tensor(name=name, shape=shape, dtype="float32", layout=layout)


def _nodes() -> tuple[Node, ...]:
    look = Node(
        name="embed::embedding.0",
        op="aten.embedding.default",
        outputs=(("S(0)", "P(sum)"),),
        inputs=(
            Edge(source="embed.weight", output=0, layout=("R", "S(0)"), steps=(), time_s=0.0),
            Edge(source="args.0", output=0, layout=("S(0)", "R"), steps=(), time_s=0.0),
        ),
        rule="masked_embedding",
        time_s=1e-5,
        count=1,
    )
    steps = ("reduce_scatter(tp, 1)", "all_to_all(tp, 1, 2)", "all_gather(tp, 2)")
    project = Node(
        name="model.layers.*.wq::mm.0",
        op="aten.mm.default",
        outputs=(("S(0)", "S(1)"), None),
        inputs=(
            Edge(source="embed::embedding.0", output=0, layout=("S(0)", "R"), steps=steps, time_s=2e-4),
            Edge(
                source="model.layers.*.wq.weight",
                output=0,
                layout=("R", "S(0)"),
                steps=("all_gather(dp, 1)",),
                time_s=3e-4,
            ),
        ),
        rule="",
        time_s=2e-3,
        count=6,
    )
    return look, project


def _predicted() -> Predicted:
    memory = Memory(
        parameters_bytes=11072,
        gradients_bytes=11072,
        optimizer_bytes=22144,
        activations_bytes=65536,
        gathered_bytes=4096,
        communication_bytes=0,
        other_bytes=0,
        peak_bytes=110000,
        limit_bytes=80 * 2**30,
    )
    return Predicted(
        step_time_s=0.9,
        compute_s=0.7,
        exposed_communication_s=0.15,
        hidden_communication_s=0.3,
        optimizer_s=0.05,
        memory=memory,
    )

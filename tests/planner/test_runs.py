"""Lists whose blocks are not all of one kind: runs of equal blocks, and periods of several, are captured by three."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright import Mesh, Plan
from meshwright.passes.blocks import repeated_blocks
from meshwright.passes.lookup import PlanLookup
from meshwright.passes.recompute import Recompute
from meshwright.planner.api import draft, plan
from meshwright.planner.checking.verify import usual_cluster
from meshwright.planner.fitting import within_rooms
from meshwright.planner.sharding.recall import recall

WIDTH = 16


class Dense(nn.Module):
    """A block: norm, up and down, residual."""

    def __init__(self, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Experts(nn.Module):
    """A block that mixes two experts by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("bd,edf->bef", x, self.weight).tanh()
        return x + (made * self.gate(x).softmax(-1)[..., None]).sum(1)


class Stack(nn.Module):
    """Blocks by a word: d for dense, w for a wider one, e for experts. A table says how each is scaled, by number."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        made: dict[str, Callable[[], nn.Module]] = {"d": Dense, "w": lambda: Dense(3 * WIDTH), "e": Experts}
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(made[kind]() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def runs(kinds: str) -> list[tuple[str, int]]:
    found = repeated_blocks(Stack(kinds))
    return [(stamp.pattern, len(stamp.numbers)) for run in found for stamp in run.stamps]


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        ("dddd", [("layers.*", 4)]),
        ("ddeeeeee", [("layers.0-1", 2), ("layers.2-7", 6)]),
        ("dweeee", [("layers.2-5", 4)]),
        ("dedededed", [("layers.0-6/2", 4), ("layers.1-7/2", 4)]),
        ("ddeddeddedded", [("layers.0-9/3", 4), ("layers.1-10/3", 4), ("layers.2-11/3", 4)]),
        ("dedede", []),
        ("wdwddededededd", [("layers.5-11/2", 4), ("layers.4-10/2", 4), ("layers.12-13", 2)]),
    ],
)
def test_runs_are_the_longest_that_repeat(kinds: str, want: list[tuple[str, int]]) -> None:
    assert sorted(runs(kinds)) == sorted(want)


def test_layers_of_one_op_are_no_period() -> None:
    pairs = [part for _ in range(6) for part in (nn.Linear(4, 4), nn.ReLU())]
    assert repeated_blocks(nn.Sequential(*pairs)) == ()


@pytest.mark.parametrize(
    ("kinds", "cut", "recompute"),
    [
        ("dddddeeeeew", 2, "block"),
        *(
            pytest.param(kinds, cut, recompute, marks=pytest.mark.slow)
            for kinds, cut in (("ddeeeeee", 1), ("dededededede", 1), ("ddeddeddeddeddedd", 1), ("wdwddededededd", 1))
            for recompute in ("none", "block")
        ),
    ],
)
def test_captured_by_runs_is_captured_whole(kinds: str, cut: int, recompute: Recompute) -> None:
    """The same optimum, with and without a limit on what memory is estimated, and the same plans and counts of both."""
    torch.manual_seed(0)
    model, args, mesh = Stack(kinds), (torch.randn(64, WIDTH),), Mesh.of((2,))
    few, all_of_them = (
        draft(model, args, cluster=usual_cluster(mesh), mesh=mesh, recompute=recompute, whole=whole)
        for whole in (False, True)
    )
    assert (len(few.blocks.cut), len(all_of_them.blocks.cut)) == (cut, 0)
    room = math.inf
    for _ in range(2):
        found = []
        for prepared in (few, all_of_them):
            solution = within_rooms(prepared, np.full(prepared.timeline.end + 1, room), 60.0, gap=1e-9)
            found.append((solution, prepared.timeline.memory(solution.choices, None), prepared.write(solution)))
        (one, estimate, plan_of_few), (other, whole_estimate, plan_of_all) = found
        assert one.objective_s == pytest.approx(other.objective_s, rel=1e-12)
        assert estimate.peak_bytes == whole_estimate.peak_bytes
        assert plan_of_few.predicted.memory.peak_bytes == plan_of_all.predicted.memory.peak_bytes
        assert plan_of_few.predicted.step_time_s == pytest.approx(plan_of_all.predicted.step_time_s, rel=1e-12)
        assert plan_of_few.model == plan_of_all.model
        assert {n.name: n.count for n in plan_of_few.nodes} == {n.name: n.count for n in plan_of_all.nodes}
        room = 0.8 * estimate.peak_bytes


@pytest.mark.parametrize(
    ("kinds", "seeds"),
    [("ddeeeee", 0), *(pytest.param(k, 2, marks=pytest.mark.slow) for k in ("ddeeeee", "dededededd"))],
)
def test_a_plan_made_of_three_blocks_runs_all(kinds: str, seeds: int) -> None:
    torch.manual_seed(0)
    model, args, mesh = Stack(kinds), (torch.randn(8, WIDTH),), Mesh.of((2,))
    made = plan(model, args, cluster=usual_cluster(mesh), mesh=mesh)
    assert Plan.from_bytes(made.to_bytes()) == made
    assert meshwright.check(model, args, mesh=mesh, plan=made, steps=2).equal
    for seed in range(seeds):
        report = meshwright.check(model, args, mesh=mesh, random=1, seed=seed, steps=2)
        assert report.equal, report


def test_names_of_a_run_are_found_by_the_number_of_any_block() -> None:
    torch.manual_seed(0)
    made = plan(Stack("ddeeeeee"), (torch.randn(8, WIDTH),), cluster="h100-sxm:2", mesh="2")
    names = {tensor.name: tensor.layout for tensor in made.parameters}
    assert {name for name in names if name.endswith("weight") and "layers" in name} == {
        "layers.0-1.norm.weight",
        "layers.0-1.up.weight",
        "layers.0-1.down.weight",
        "layers.2-7.gate.weight",
        "layers.2-7.weight",
    }
    lookup = PlanLookup(made)
    for number in range(2, 8):
        assert lookup.layout(f"layers.{number}.gate.weight") == names["layers.2-7.gate.weight"]
        assert meshwright.explain(made, f"layers.{number}.gate.weight").facts[0].copies == 6
    assert lookup.layout("layers.8.gate.weight") is None
    assert lookup.layout("layers.1.gate.weight") is None
    assert "2 of layers.0-1, 6 of layers.2-7" in made.summary()


@pytest.mark.slow
def test_constraints_meet_the_blocks_of_every_run() -> None:
    torch.manual_seed(0)
    model, args = Stack("dddddeeeee"), (torch.randn(8, WIDTH),)

    def layouts(*constraints: str) -> dict[str, tuple[str, ...]]:
        made = plan(model, args, cluster="h100-sxm:2", mesh="2", constraints=constraints)
        return {tensor.name: tensor.layout for tensor in made.parameters}

    both = layouts("layers.*.weight = S(0)")
    assert {both["layers.0-4.up.weight"], both["layers.5-9.gate.weight"]} == {("S(0)",)}
    run = layouts("layers.0-4.up.weight = S(1)")
    assert run["layers.0-4.up.weight"] == ("S(1)",)
    one = layouts("layers.3.up.weight = S(1)")
    assert one["layers.3.up.weight"] == ("S(1)",) and "layers.0-4.up.weight" in one
    some = layouts("layers.[6-7].gate.weight = S(1)")
    assert {name for name in some if "gate.weight" in name} == {f"layers.{n}.gate.weight" for n in ("6", "7", "5-9")}


@pytest.mark.slow
def test_only_the_run_that_a_constraint_divides_is_captured_whole() -> None:
    model, args = Stack("dddddeeeee"), (torch.randn(8, WIDTH),)
    for text, cut in (("layers.3.up.weight != R", 1), ("layers.0-4.up.weight != R", 2), ("layers.2-6.* != R", 0)):
        prepared = draft(model, args, cluster="h100-sxm:2", mesh="2", constraints=[text])
        assert len(prepared.blocks.cut) == cut, text


class Numbered(Stack):
    """Goes by the numbers and attributes of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        scales = [1.0 + number // 5 for number in range(len(self.layers))]
        for number, layer in enumerate(self.layers):
            assert layer.kind == "first" if number < 5 else layer.kind == "second"
            x = layer(x * scales[number] if number == 5 else x)
        return self.last(x).square().mean()


def test_blocks_keep_their_numbers_and_attributes() -> None:
    torch.manual_seed(0)
    model = Numbered("dddddeeeee")
    for number, layer in enumerate(model.layers):
        layer.kind = "first" if number < 5 else "second"  # type: ignore[assignment]
        layer.layer_idx = number  # type: ignore[assignment]
    prepared = draft(model, (torch.randn(8, WIDTH),), cluster="h100-sxm:2", mesh="2")
    assert len(prepared.blocks.cut) == 2
    numbers = {re.split("[.:]", name)[1] for name in prepared.captured.names.values() if name.startswith("layers.")}
    assert numbers == {"0", "1", "4", "5", "6", "9"}
    assert meshwright.check(model, (torch.randn(8, WIDTH),), mesh=Mesh.of((2,)), steps=2).equal


class Backwards(Stack):
    """The last block comes first."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return self.last(x).square().mean()


def test_blocks_may_come_in_another_order() -> None:
    torch.manual_seed(0)
    model, args = Backwards("dddddd"), (torch.randn(8, WIDTH),)
    prepared = draft(model, args, cluster="h100-sxm:2", mesh="2")
    assert prepared.blocks.cut
    assert meshwright.check(model, args, mesh=Mesh.of((2,)), steps=2).equal


@pytest.mark.slow
def test_a_plan_is_recalled_by_a_deeper_model() -> None:
    torch.manual_seed(0)
    args = (torch.randn(8, WIDTH),)
    made = plan(Stack("ddeeeeew"), args, cluster="h100-sxm:2", mesh="2")
    for kinds in ("ddeeeeew", "ddeeeeeeeew"):
        prepared = draft(Stack(kinds), args, cluster="h100-sxm:2", mesh="2")
        found = recall(made, prepared.formulation)
        assert found.whole, found

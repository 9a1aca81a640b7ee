"""What pipelines of others got wrong (github issues of torch, torchtitan, Megatron-LM and zero-bubble), held here."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import fx, nn

from meshwright.cost_models.pipeline import StageCosts, simulate
from meshwright.passes.weights import keeping
from meshwright.planner.stages.named_pipelines import equal_firsts
from meshwright.planner.stages.staging import balanced_cuts
from meshwright.planner.zoo import named_schedule
from meshwright.plans import Action, RequestError, Schedule

from ..pipelines import pipelined
from .test_pipeline_runs import checked, model_of


class Twice(nn.Module):
    """One weight used twice in a stage, and an op of several results whose gradients meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Parameter(torch.randn(6, 6) / 3)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = x @ self.twice @ self.twice
        for layer in self.layers:
            a, b, c = layer(h).chunk(3, dim=1)
            h = h + torch.cat([a * b, b.tanh(), c - a], dim=1)
        return (h.sum(1) - target).square().mean()


@pytest.mark.parametrize(("schedule", "count"), [("zb-h1", 4), ("1f1b", 1)])
def test_weights_used_twice_ops_of_several_results_and_few_micro_batches(schedule: str, count: int) -> None:
    """pytorch #180952 and #170277 (wrong split gradients), torchtitan #775 (a hang with fewer micro-batches)."""
    model = model_of(Twice)
    torch.manual_seed(1)
    args = (torch.randn(4, 6).double(), torch.randn(4).double())
    order = named_schedule(schedule, 2, count)
    report = checked(model, args, *pipelined(model, args, mesh="1", schedule=order, seed=0))
    assert report.equal, report


def test_micro_batches_out_of_order_on_the_last_stage_are_refused() -> None:
    """torch's runtime takes the loss of another micro-batch, or ends with wrong gradients."""
    actions = [Action(0, kind, index) for kind in "FB" for index in (1, 0)]
    schedule = Schedule(microbatches=2, placement=(0,), actions=(tuple(actions),))
    with pytest.raises(RequestError, match="micro-batches in order, got 0F1"):
        schedule.check()


def test_every_layer_is_in_a_stage() -> None:
    """Megatron-LM #1304, torchtitan #963: layers that the ranks do not divide were left out."""
    rng = random.Random(0)
    for _ in range(200):
        layers, stages = rng.randint(2, 60), rng.randint(1, 16)
        if stages > layers:
            continue
        cuts = balanced_cuts([1.0] * layers, stages)
        sizes = [b - a for a, b in pairwise([0, *cuts, layers])]
        assert sum(sizes) == layers and min(sizes) >= 1 and max(sizes) - min(sizes) <= layers // stages + 1
        assert max(sizes) == -(-layers // stages)


def test_a_heavy_head_has_fewer_layers_beside_it() -> None:
    """torchtitan #2093: a head that costs as much as several layers needs no setting by hand."""
    cuts = balanced_cuts([0.2, *[1.0] * 12, 6.0], 3)
    assert cuts == (6, 12) or cuts == (7, 13)
    assert max(sum([0.2, *[1.0] * 12, 6.0][a:b]) for a, b in pairwise([0, *cuts, 14])) <= 6.2


def test_memory_does_not_grow_with_micro_batches() -> None:
    """marin #6532: gradients kept per micro-batch made the peak grow with their number."""
    peaks = []
    for count in (8, 16, 32):
        costs = StageCosts(forward=(1.0,) * 4, input_gradient=(1.0,) * 4, weight_gradient=(1.0,) * 4)
        peaks.append(simulate(named_schedule("1f1b", 4, count), costs).peak_memory)
    assert peaks[0] == peaks[1] == peaks[2]


def test_gradients_are_added_up_as_they_are_made() -> None:
    """Those of a whole stage, fresh beside those that are added up, would take their place twice."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(torch.mul, (x, 2)), graph.call_function(torch.mul, (x, 3))
    passed = graph.call_function(torch.add, (first, second))
    graph.output((first, passed, second, x))
    made = keeping(graph, ["a", None, "b", "c"])
    order = [node.name for node in made.nodes if node.op == "call_function"]
    assert order.index("mul") + 1 == order.index("_kept_1")
    kept: dict[str, torch.Tensor] = {}
    given = fx.GraphModule(nn.Module(), made)(torch.ones(2), kept.__setitem__)
    assert [t.tolist() for t in given] == [[5.0, 5.0]]
    assert {name: t.tolist() for name, t in kept.items()} == {"c": [1, 1], "a": [2, 2], "b": [3, 3]}


def test_a_model_with_too_few_ops_for_its_stages_is_refused() -> None:
    model = model_of(Twice)
    args = (torch.randn(4, 6).double(), torch.randn(4).double())
    _, captured = pipelined(model, args, mesh="1", schedule=named_schedule("1f1b", 1, 1), seed=0)
    with pytest.raises(RequestError, match="leave an op for each stage"):
        equal_firsts(captured, 500)

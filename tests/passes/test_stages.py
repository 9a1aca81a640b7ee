"""Stages of a captured model, run one after the other, compute what the whole program computes, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.passes.graph import Captured
from meshwright.passes.local import localize
from meshwright.passes.lookup import PlanLookup
from meshwright.passes.places import forward_ops, light_ops
from meshwright.passes.recompute import RECOMPUTE, Recompute
from meshwright.passes.simulate import piece, run_ranks
from meshwright.passes.split import split
from meshwright.passes.stage_lookup import StageLookup
from meshwright.passes.stages import StageProgram, cut_stages
from meshwright.passes.trees import flatten_call
from meshwright.planner.api import Draft, draft
from meshwright.planner.checking.verify import random_plan, usual_cluster
from meshwright.plans import Mesh, Plan, RequestError

from ..architectures import ARCHITECTURES

Values = list[dict[Any, torch.Tensor]]


class Tied(nn.Module):
    """A head that shares the embedding, a skip over both layers, a running mean, a table that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        turn = (tokens.double() * 0.1).sin().unsqueeze(-1)
        start = self.embed(tokens) * turn
        hidden = self.norm(self.first(start).tanh())
        hidden = nn.functional.dropout(self.second(hidden) * turn, 0.5) + start
        return nn.functional.linear(hidden, self.embed.weight).logsumexp(-1).mean()


@dataclass(slots=True)
class Whole:
    """A planned model and, per rank, its sources."""

    plan: Plan
    captured: Captured
    mesh: Mesh
    feeds: Values
    tangents: dict[int, torch.Tensor]

    @classmethod
    def of(cls, prepared: Draft, model: nn.Module, call: tuple, seed: int) -> Whole:
        captured, plan, mesh = prepared.captured, random_plan(prepared, seed), prepared.formulation.mesh
        tensors, tree = flatten_call(*call)
        given = dict(zip(tree.names, tensors, strict=True)) | dict(model.named_buffers(remove_duplicate=False))
        given |= dict(model.named_parameters(remove_duplicate=False))
        lookup = PlanLookup(plan)
        feeds: Values = [
            {s.name: piece(given[s.name].detach(), lookup(s.name).outputs[0], mesh, c) for s in _sources(captured)}  # type: ignore[arg-type]
            for c in mesh.coordinates()
        ]
        values = {i: captured.outputs[i].meta["val"] for i in captured.tangents}  # type: ignore[union-attr]
        tangents = {i: torch.randn(value.shape, dtype=value.dtype) for i, value in values.items()}
        return cls(plan, captured, mesh, feeds, tangents)


def _sources(captured: Captured) -> list:
    return list(captured.sources.values())


def run(
    captured: Captured, lookup: Any, mesh: Mesh, feeds: Values
) -> tuple[Values, Values, Callable[[Values], Values]]:
    """Outputs, changed buffers, and what runs the backward from tangents, per simulated rank."""
    groups = [f"axis:{a}" for a in range(mesh.ndim)]
    halves = [split(localize(captured, lookup, mesh, c, groups)) for c in mesh.coordinates()]
    program = halves[0].program
    given = [[rank[n] for n in program.sources] for rank in feeds]
    with torch.no_grad():
        results = run_ranks([h.forward.graph for h in halves], given, mesh, program.constants)
    count = len(program.outputs)
    outputs = [dict(zip(program.outputs, r, strict=False)) for r in results]
    changed = [dict(zip(program.mutations, r[count:], strict=False)) for r in results]

    def backward(tangents: Values) -> Values:
        saved = [r[halves[0].results :] for r in results]
        ins = [[*s, *(t[i] for i in program.tangents)] for s, t in zip(saved, tangents, strict=True)]
        with torch.no_grad():
            ends = run_ranks([h.backward.graph for h in halves], ins, mesh, program.constants)
        return [dict(zip(program.gradients, end, strict=True)) for end in ends]

    return outputs, changed, backward


def run_stages(whole: Whole, stages: list[StageProgram]) -> tuple[Values, Values, Values]:
    """Outputs, changed buffers and gradients, the stages run in turn forwards and then backwards."""
    ranks = range(whole.mesh.size)
    passed, back, outputs, changed, grads = ([{} for _ in ranks] for _ in range(5))  # type: ignore[var-annotated]
    ran = []
    for stage in stages:
        feeds = [{**whole.feeds[r], **passed[r]} for r in ranks]
        made, updated, backward = run(stage.captured, StageLookup(whole.plan, stage), whole.mesh, feeds)
        ran.append(backward)
        for r in ranks:
            passed[r].update({name: made[r][at] for at, name in enumerate(stage.sends)})
            outputs[r].update({index: made[r][at] for index, at in stage.results.items()})
            changed[r].update(updated[r])
    for stage, backward in reversed(list(zip(stages, ran, strict=True))):
        base = len(stage.sends) + len(stage.results)
        own = {at: whole.tangents[i] for i, at in stage.results.items() if i in whole.tangents}
        tangents = [{**own, **{base + j: back[r][n] for j, n in enumerate(stage.receives_gradient)}} for r in ranks]
        for r, found in enumerate(backward(tangents)):
            for name, value in found.items():
                if name in stage.sends_gradient:
                    back[r][name] = value
                else:
                    grads[r][name] = grads[r][name] + value if name in grads[r] else value
    return outputs, changed, grads


def agree(whole: Whole, stages: list[StageProgram]) -> None:
    """AssertionError unless both runs give the same."""
    torch.manual_seed(3)
    outputs, changed, backward = run(whole.captured, PlanLookup(whole.plan), whole.mesh, whole.feeds)
    grads = backward([whole.tangents for _ in whole.feeds])
    torch.manual_seed(3)
    for want, got in zip((outputs, changed, grads), run_stages(whole, stages), strict=True):
        for one, other in zip(want, got, strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                near = 1e-6 if value.dtype is torch.float32 else 1e-12
                torch.testing.assert_close(other[name], value, rtol=near, atol=near, msg=str(name))


def cut_at_random(captured: Captured, count: int, seed: int) -> list[StageProgram]:
    light, ops = light_ops(captured), forward_ops(captured)
    places = [i for i, node in enumerate(ops) if i and node not in light]
    starts = sorted(random.Random(seed).sample(places, count - 1))
    return cut_stages(captured, ["", *(captured.names[ops[i]] for i in starts)])


def tied(mesh: str = "2", seed: int = 0, recompute: Recompute = "none") -> Whole:
    torch.manual_seed(0)
    model, call = Tied().double(), ((torch.arange(6),), {})
    grid = Mesh.parse(mesh)
    return Whole.of(draft(model, *call, cluster=usual_cluster(grid), mesh=grid, recompute=recompute), model, call, seed)


@pytest.mark.parametrize("seed", range(4))
def test_stages_cut_anywhere_equal_the_whole(seed: int) -> None:
    whole = tied(seed=seed, recompute=RECOMPUTE[seed % 3])
    agree(whole, cut_at_random(whole.captured, 2 + seed % 3, seed))


def test_a_tied_parameter_has_a_part_of_its_gradient_in_each_stage() -> None:
    whole = tied()
    first, last = cut_stages(whole.captured, ["", "second"])
    assert first.shared == last.shared == {"embed.weight"}
    assert "embed.weight" in first.captured.grads
    assert "embed.weight" in last.captured.grads
    assert "embed.weight" not in last.sends_gradient
    agree(whole, [first, last])


def test_a_skip_is_carried_through_the_stages_between() -> None:
    whole = tied()
    stages = cut_stages(whole.captured, ["", "first", "second"])
    assert set(stages[1].receives) & set(stages[1].sends)
    # Its two gradients meet above the stage that made it, which receives their sum.
    assert len(stages[1].receives_gradient) == 2
    assert len(stages[0].receives_gradient) == 1
    agree(whole, stages)


def test_what_inputs_alone_make_is_made_again_and_not_sent() -> None:
    first, last = cut_stages(tied().captured, ["", "second"])
    names = [set(stage.captured.names.values()) for stage in (first, last)]
    assert any("sin" in name for name in names[0] & names[1])
    assert not any("sin" in name for name in first.sends)


@pytest.mark.parametrize("firsts", [["", "nowhere"], ["", "second", "first"], ["second"], ["", "first", "first"]])
def test_a_stage_must_begin_with_an_op_after_the_stage_before(firsts: list[str]) -> None:
    captured = tied().captured
    with pytest.raises(RequestError, match="'first' of stage"):
        cut_stages(captured, firsts)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2", "2x2"])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "t5", "bert", "vit", "resnet", "whisper", "gemma2", "swin", "clip", "mixtral"]
)
def test_stages_of_real_architectures_equal_the_whole(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[name]()
    grid = Mesh.parse(mesh)
    prepared = draft(model, args, kwargs, cluster=usual_cluster(grid), mesh=grid, whole=True)
    whole = Whole.of(prepared, model, (args, kwargs), 1)
    for seed in range(3):
        agree(whole, cut_at_random(whole.captured, 2 + seed, seed))

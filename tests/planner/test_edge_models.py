"""Models at the edge of what can be planned: with nothing to train, nothing to run, or a form that is refused by name;
and plan files whose entries say what no op of the model can do."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from meshwright import CaptureError, Plan, ReplayError, check, plan


class _Gives(nn.Module):
    def __init__(self, found: object) -> None:
        super().__init__()
        self.lin, self.found = nn.Linear(5, 8), found

    def forward(self, x: torch.Tensor) -> object:
        return self.found


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lin = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.words(x))


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (_Gives(None), torch.randn(6, 5), "'model' must return a tensor, got NoneType"),
        (_Gives({"loss": 3.0}), torch.randn(6, 5), "'model' must return a tensor, got dict"),
        (_Sparse(), torch.ones(4, 5, dtype=torch.int64), "'model' must have dense gradients, got .* words.weight"),
    ],
    ids=["none", "number", "sparse"],
)
def test_what_cannot_be_trained_is_refused_by_name(model: nn.Module, inputs: torch.Tensor, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        plan(model, (inputs,), cluster="cpu:2")
    with pytest.raises(CaptureError, match=words):
        check(model, (inputs,), mesh="2")


def test_models_without_anything_to_train_are_planned_and_checked() -> None:
    frozen = nn.Linear(5, 8).requires_grad_(False)
    for model, ops in ((frozen, True), (nn.Identity(), False)):
        found = plan(model, (torch.randn(6, 5),), cluster="cpu:2")
        assert found.predicted.memory.gradients_bytes == found.predicted.memory.optimizer_bytes == 0
        assert any("::bwd" in node.name for node in found.nodes) is False
        assert (found.predicted.compute_s > 0) is ops
        assert check(model, (torch.randn(6, 5),), plan=found, steps=2).equal


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_every_forward_makes_anew_is_no_hindrance() -> None:
    model = torch.nn.utils.weight_norm(nn.Linear(5, 8))
    report = check(model, (torch.randn(6, 5),), mesh="2", steps=2)
    assert report.equal and report.max_error < 1e-12


def _changed(found: Plan, name: str, **values: object) -> Plan:
    nodes = tuple(msgspec.structs.replace(n, **values) if n.name == name else n for n in found.nodes)
    return msgspec.structs.replace(found, nodes=nodes)


def test_entries_that_no_op_can_follow_are_refused_by_name() -> None:
    model, args = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), (torch.randn(6, 5),)
    found = plan(model, args, cluster="cpu:2")
    relu = next(node.name for node in found.nodes if node.op == "relu")
    for values, words in (
        ({"rule": "nosuch"}, f"must give {relu} a 'rule' of .* got 'nosuch'"),
        ({"rule": "region"}, f"must give {relu} a 'rule' that relu can run by, got 'region'"),
    ):
        with pytest.raises(ReplayError, match=words):
            check(model, args, plan=_changed(found, relu, **values), steps=1)
    for name in ("output.0::output", "0.weight::gradient"):
        with pytest.raises(ReplayError, match=f"must give {name} one input, .* got 0 in its 'inputs'"):
            check(model, args, plan=_changed(found, name, inputs=()), steps=1)

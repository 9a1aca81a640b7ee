"""Inputs and outputs of any type come apart into tensors and come back as the user's own type."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils.generic import ModelOutput

import meshwright
from meshwright.passes.trees import flatten
from meshwright.plans.errors import CaptureError

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    name: str = "x"


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Out
    many: tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def made(x: torch.Tensor) -> list[Any]:
    return [
        {"b": x, "a": [x, (x + 1, None)]},
        OrderedDict(z=x, a=x + 1),
        Pair(x, {"k": x}),
        Out(x, name="y"),
        Frozen(Out(x, x + 1), (x, x)),
        Output(loss=x.sum(), states=(x, x)),
        [3, "word", x],
    ]


@pytest.mark.parametrize("at", range(7))
def test_a_value_comes_back_as_its_own_type(at: int) -> None:
    value = made(torch.arange(3.0))[at]
    tensors, tree = flatten(value, what="output")
    again = tree.build([t * 2 for t in tensors])
    assert type(again) is type(value)
    doubled, same = flatten(again, what="output")
    assert (same.names, same.constants) == (tree.names, tree.constants)
    assert all(torch.equal(d, t * 2) for d, t in zip(doubled, tensors, strict=True))
    if isinstance(value, dict):
        assert list(again) == list(value)


def test_tensors_that_hide_in_an_unknown_object_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"got Holder at output\.k; make it a dataclass or register it"):
        flatten({"k": Holder(torch.ones(2))}, what="output")


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any], pair: Pair) -> tuple[Any, ...]:
        return tuple(made(self.linear(batch["x"][0]) + pair.left * pair.right))


def test_nested_inputs_and_outputs_of_a_split_model_are_equal() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    call = ({"x": [x, 2], "y": None}, Pair(torch.randn(4, 4), torch.randn(4)))
    for random in (0, 1):
        report = meshwright.check(Everything(), call, mesh="2", random=random, steps=2)
        assert report.equal and report.compared > 20

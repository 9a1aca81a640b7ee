"""Models of one function, and the comparison of a captured program with the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.passes import Captured, op_name
from meshwright.passes.trees import flatten

from ..oracle import captured_values, held_by

__all__ = ["Function", "assert_equal_to_eager", "layer", "ops", "real"]


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layer(into: int = 4, out: int = 4) -> nn.Linear:
    return nn.Linear(into, out, dtype=torch.float64)


def assert_equal_to_eager(
    model: nn.Module, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, tolerance: float = 1e-12
) -> Captured:
    """Outputs, gradients and buffers of the captured program against the model itself; guards come after outputs."""
    eager = copy.deepcopy(model)
    torch.manual_seed(0)
    captured, values = captured_values(model, args, kwargs or {})
    torch.manual_seed(0)
    out, _ = flatten(eager(*args, **(kwargs or {})), what="output")
    guards = [name for name in captured.output_tree.names if name.startswith("guard.")]
    assert [node is not None for node in captured.outputs] == [True] * (len(out) + len(guards))
    for node, want in zip(captured.outputs, out, strict=False):
        torch.testing.assert_close(values[node], want.detach(), rtol=tolerance, atol=tolerance)
    ends = [(out[i], values[node]) for i, node in captured.tangents.items()]
    if ends:
        torch.autograd.backward(*zip(*ends, strict=True))
    for name, parameter in eager.named_parameters():
        have = values[captured.grads[name]] if name in captured.grads else None
        assert (have is None) == (parameter.grad is None), name
        torch.testing.assert_close(have, parameter.grad, rtol=tolerance, atol=tolerance)
    for name, node in captured.mutations.items():
        torch.testing.assert_close(values[node], held_by(eager, name), rtol=tolerance, atol=tolerance)
    return captured


def ops(captured: Captured, *, backward: bool) -> list[str]:
    return [op_name(n) for n in captured.ops() if (n in captured.backward) == backward]

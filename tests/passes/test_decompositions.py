"""Our own decompositions compute what their ops compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.passes.decompositions import DECOMPOSITIONS

aten = torch.ops.aten


def test_weight_norm_backward_is_the_derivative() -> None:
    v, g = (torch.randn(3, width, dtype=torch.float64, requires_grad=True) for width in (4, 1))
    out, norms = torch.ops.aten._weight_norm_interface(v, g, 0)
    grad = torch.randn_like(out)
    op = torch.ops.aten._weight_norm_interface_backward.default
    have = DECOMPOSITIONS[op](grad, v, g, norms.detach(), 0)
    for mine, theirs in zip(have, torch.autograd.grad(out, (v, g), grad), strict=True):
        torch.testing.assert_close(mine, theirs)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (aten.masked_scatter.default, lambda: (real(5, 6), mask(5, 6), real(7, 6))),
        (aten.masked_scatter.default, lambda: (real(5, 6), mask(5, 1), real(5, 6))),
        (aten.masked_scatter.default, lambda: (real(5, 6), torch.zeros(5, 6, dtype=torch.bool), real(0))),
        (aten.masked_scatter_backward.default, lambda: (real(5, 6), mask(5, 6), [7, 6])),
        (aten._is_all_true.default, lambda: (mask(5),)),
        (aten._is_any_true.default, lambda: (mask(5),)),
        (aten._trilinear.default, lambda: (real(5, 3), real(4, 3, 2), real(5, 2), [1, 3], [0], [1, 2], [2, 3])),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_decomposition_equals_its_op(op: Any, inputs: Callable[[], tuple]) -> None:
    torch.manual_seed(0)
    given = inputs()
    torch.testing.assert_close(DECOMPOSITIONS[op](*given), op(*given), rtol=1e-12, atol=1e-12)

"""Random numbers: a planned program draws them in the order in which the model does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright import check


class _GradientNoise(torch.autograd.Function):
    """What is drawn in the forward for the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.rand_like(x))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (noise,) = ctx.saved_tensors
        return 2 * grad * noise


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _GradientNoise.apply(self.weight(x))
        first = torch.rand_like(y).uniform_()  # the numbers of rand_like are read by nobody
        return (y * first + y * torch.empty_like(y).exponential_()).square().mean()


def test_draws_that_the_forward_does_not_read_come_where_they_came() -> None:
    assert check(Draws(), (torch.randn(4, 8),), mesh="2", random=1).equal

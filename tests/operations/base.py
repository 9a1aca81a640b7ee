"""How a small module is made of a layer or of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["WIDTH", "After", "Build", "Made", "after", "indices", "layer", "spd", "whole"]

Made = tuple[nn.Module, tuple, dict[str, Any]]
Build = Callable[[], Made]
WIDTH = 6


class After(nn.Module):
    """A function of a linear layer's output (batch, ..., WIDTH), of what else is given, and of two parameters."""

    def __init__(self, function: Callable[..., Any], width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.function = function

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return self.function(self.inner(x) * self.scale, *rest)


def after(function: Callable[..., Any], *shape: int, rest: Callable[[], tuple] = tuple) -> Build:
    """`After` of a function on random numbers of `shape` (default: a batch of 5 by WIDTH) and `rest`."""
    size = shape or (5, WIDTH)
    return lambda: (After(function, size[-1]), (torch.randn(size), *rest()), {})


def layer(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Build:
    return lambda: (make(), tuple(torch.randn(shape) for shape in shapes), {})


def spd(x: torch.Tensor) -> torch.Tensor:
    """Matrices that are symmetric and far from singular."""
    return x @ x.mT + 2 * torch.eye(x.shape[-1], dtype=x.dtype)


def whole(size: int) -> Callable[[], tuple]:
    return lambda: (torch.randn(size, size),)


def indices(*values: int) -> Callable[[], tuple]:
    return lambda: (torch.tensor(values),)

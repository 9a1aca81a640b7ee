"""Ways of writing a model: operators that hold programs, views in place, regions, structured outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .base import WIDTH, After, Build, Made, after, layer, whole

__all__ = ["PROGRAMS"]


class Tripled(torch.autograd.Function):
    """A Function whose backward is its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        ctx.save_for_backward(x)
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 3 + x.mean(0, keepdim=True), None


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward, in both ways, one of them with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> Any:
        x = checkpoint(lambda t: self.drop(self.one(t).tanh()), x, use_reentrant=False)
        return checkpoint(lambda t: self.two(t).relu(), x, use_reentrant=True)


class Cast(nn.Module):
    """Mixed precision: products and a convolution in bfloat16, sums in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.two(self.norm(F.gelu(self.one(x))))
            with torch.autocast("cpu", enabled=False):
                return x.float().softmax(-1)


@dataclasses.dataclass
class Result:
    """What a model gives, with things in it that are no tensors."""

    value: torch.Tensor
    parts: dict[str, torch.Tensor]
    label: str = "made"
    count: int = 2


class InPlace(nn.Module):
    """In-place ops on activations and on views of them, and buffers that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y[:, ::2].mul_(2).add_(1)
        y.transpose(0, 1)[1].copy_(x[:, 0])
        y.view(-1, 2, 3)[:, 1].mul_(3)
        y.masked_fill_(x > 1, 0.5)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.steps += 1
        out = torch.empty_like(y)
        out[...] = y
        out[1:3, 2] = self.mean[0]
        return out.flatten()[3:].unflatten(0, (-1, 3)).diagonal().cumsum_(0) + y.sum()


class Compiled(nn.Module):
    """A model part of which is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.Linear(6, 6), backend="eager")
        self.act = torch.compile(lambda x: x.sin() + 1, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.inner(x))


def scanned() -> Made:
    from torch._higher_order_ops.scan import scan

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        def step(carry: tuple, at: dict) -> tuple:
            new = torch.tanh(carry[0] @ w + at["x"])
            return (new, carry[1] + new.sum(-1)), new * 2

        start = (x.new_zeros(x.shape[0], WIDTH), x.new_zeros(x.shape[0]))
        return scan(step, start, {"x": x}, dim=1, reverse=True)

    return After(run), (torch.randn(5, 3, WIDTH), torch.randn(WIDTH, WIDTH)), {}


def associatively_scanned() -> Made:
    from torch._higher_order_ops.associative_scan import associative_scan

    def run(x: torch.Tensor) -> Any:
        first, second = x.sigmoid(), x * 2

        def join(p: tuple, q: tuple) -> tuple:
            return p[0] * q[0], q[0] * p[1] + q[1]

        return associative_scan(join, (first, second), dim=1, combine_mode="generic")[1]

    return After(run), (torch.randn(3, 5, WIDTH),), {}


def mapped() -> Made:
    from torch._higher_order_ops.map import map as map_over

    return (
        After(lambda x: map_over(lambda row, by: (row * by).cumsum(0), x, x[0].clone())),
        (torch.randn(5, WIDTH),),
        {},
    )


def branched() -> Made:
    def run(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos(), (x,))

    return After(run), (torch.randn(5, WIDTH),), {}


def looped() -> Made:
    from torch._higher_order_ops.while_loop import while_loop

    def run(x: torch.Tensor) -> Any:
        count = torch.zeros((), dtype=torch.long)
        return while_loop(lambda n, t: n < 3, lambda n, t: (n + 1, t.sin() + 1), (count, x))[1]

    return After(run), (torch.randn(5, WIDTH),), {}


PROGRAMS: dict[str, Build] = {
    "function": after(lambda x: Tripled.apply(x, 2.0)),
    "checkpointed": layer(Checkpointed, (5, 6)),
    "autocast": layer(Cast, (5, 6)),
    "in-place": layer(InPlace, (5, 6)),
    "dataclass": after(lambda x: Result(x * 2, {"a": x.sum(0), "b": x.mean(1)})),
    "nested": after(lambda x, given: {"a": [x, (x * given["y"], None)], "b": 3}, rest=lambda: ({"y": torch.randn(6)},)),
    "vmapped": after(lambda x: torch.vmap(lambda row: row.outer(row).sum(0))(x)),
    "differentiated": after(lambda x: torch.func.vmap(torch.func.jacrev(lambda t: t.sin().sum() * t))(x)),
    "compiled": layer(Compiled, (5, 6)),
    "scan": scanned,
    "associative-scan": associatively_scanned,
    "map": mapped,
    "cond": branched,
    "while-loop": looped,
    "einsum": after(
        lambda x, y: (torch.einsum("bi,ij,bj->b", x, y, x), torch.einsum("bi->i", x), torch.tensordot(x, y, 1)),
        rest=whole(6),
    ),
    "sparse-free": after(
        lambda x: (
            torch.block_diag(x, x),
            torch.cartesian_prod(x[0], x[1]),
            torch.meshgrid(x[0], x[:, 0], indexing="ij"),
        )
    ),
    "vander": after(
        lambda x: (
            torch.triu(x @ x.T, 1),
            torch.tril_indices(3, 3)[0] * x[0],
            torch.rot90(x),
            torch.cov(x),
            torch.corrcoef(x),
        )
    ),
}

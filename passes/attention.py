"""Attention where the captured op cannot run: on devices other than the CPU, and of no samples, heads or queries.

The captured graph holds the CPU's attention op and its backward; that kernel does not take empty pieces. Elsewhere they
run as two functions, which call torch.nn.functional.scaled_dot_product_attention: the fastest fused kernel that PyTorch
picks there; the backward runs the forward again to get at the kernel's own backward (torch.compile breaks its graph
around them). Shapes: q (batch, heads, queries, head_dim), k and v (batch, kv heads, keys, head_dim), lse (batch, heads,
queries)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..plans.layouts import Layout, local_shape
from .graph import values_of
from .naming import op_name

__all__ = [
    "attention",
    "attention_backward",
    "attention_elsewhere",
    "attention_of_nothing",
    "attention_rows",
    "attention_rows_backward",
    "zeros",
]


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> torch.Tensor:
    same = q.shape[1] == k.shape[1]
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=not same)


@torch.compiler.disable
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without dropout. The second result stands for the log-sum-exp, which the backward does not need."""
    out = _forward(q, k, v, mask, causal, scale)
    return out.contiguous(), q.new_zeros(q.shape[:3], dtype=_sum_dtype(q))


@torch.compiler.disable
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for the gradient of the output."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = _forward(leaves[0], leaves[1], leaves[2], mask, causal, scale)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float | None) -> torch.Tensor:
    """Causal attention of the queries from number `first` on: keys after the last of them are not seen."""
    until = first + q.shape[2]
    if q.is_cuda:
        mask = causal_lower_right(q.shape[2], until)  # says which kernel fits; it cannot be made of a fake tensor
    else:
        mask = torch.ones(q.shape[2], until, dtype=torch.bool, device=q.device).tril(first)
    same = q.shape[1] == k.shape[1]
    return scaled_dot_product_attention(q, k[:, :, :until], v[:, :, :until], mask, scale=scale, enable_gqa=not same)


@torch.compiler.disable
def attention_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention`, causal, for the queries from number `first` on and all keys."""
    out = _rows(q, k, v, first, scale)
    return out.contiguous(), q.new_zeros(q.shape[:3], dtype=_sum_dtype(q))


@torch.compiler.disable
def attention_rows_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention_rows`: those of k and v are what these queries give to them."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(_rows(leaves[0], leaves[1], leaves[2], first, scale), leaves, grad)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _sum_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def zeros(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """A zero tensor per shape and dtype."""
    return tuple(torch.zeros(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True))


def attention_of_nothing(
    node: fx.Node,
    outs: Sequence[Layout | None],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    device: torch.device,
) -> tuple[Any, tuple, dict[str, Any]] | None:
    """Target and arguments in place of the attention op `node` at a mesh position where its first result, in
    the layouts `outs`, is empty; None elsewhere. A term of a sum over queries is zero there."""
    if not op_name(node).startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return None
    found = [(v, o) for v, o in zip(values_of(node), outs, strict=True) if v is not None and o is not None]
    shapes = [list(local_shape(value.shape, layout, mesh, coordinate)) for value, layout in found]
    if math.prod(shapes[0]) or not found[0][0].numel():
        return None
    return zeros, (shapes, [value.dtype for value, _ in found]), {"device": device}


def attention_elsewhere(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple] | None:
    """Target and arguments that take the place of the CPU's attention op `node`; None for another node.

    Raises NotImplementedError for dropout inside of attention, which has no counterpart with the same mask.
    """
    short = op_name(node)
    if not short.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return None
    target: Any = node.target
    given = dict(zip([a.name for a in target._schema.arguments], args, strict=False)) | kwargs
    if given.get("dropout_p"):
        raise NotImplementedError("dropout inside of attention must be 0 on this device; use dropout after attention")
    rest = (given.get("attn_mask"), bool(given.get("is_causal", False)), given.get("scale"))
    if short.endswith("backward"):
        return attention_backward, (given["grad_out"], given["query"], given["key"], given["value"], *rest)
    return attention, (given["query"], given["key"], given["value"], *rest)

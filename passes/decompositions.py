"""Our own decompositions: ops that PyTorch has none for, in terms of ops that shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """w = g * v / |v|, the norm over all dims but `dim`."""
    dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(dims, keepdim=True) / norms
    return g / norms * (grad - v * along / norms), along


def _places(mask: torch.Tensor) -> torch.Tensor:
    """For each element of a flat mask how many true ones stand before it."""
    return mask.to(torch.int64).cumsum(0) - mask.to(torch.int64)


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The elements of `source` in order where `mask` (shaped like `x`, or broadcast to it) is true."""
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel():
        return x.clone()
    places = _places(mask.reshape(-1)).clamp(max=max(0, source.numel() - 1))
    return torch.where(mask, source.reshape(-1)[places].reshape(x.shape), x)


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The gradient of the source, of `sizes`: zero for what was not used."""
    grad, mask = torch.broadcast_tensors(grad, mask)
    flat, count = mask.reshape(-1), 1
    for size in sizes:
        count *= size
    spare = torch.where(flat, _places(flat), count)
    return grad.new_zeros(count + 1).index_put((spare,), grad.reshape(-1), accumulate=True)[:count].reshape(list(sizes))


def _trilinear(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    summed: Sequence[int],
    unroll: int = 1,
) -> torch.Tensor:
    """The product of three tensors, each without some dims of the whole, summed over some."""
    letters = [chr(97 + d) for d in range(a.dim() + len(expand_a))]
    names = ["".join(x for d, x in enumerate(letters) if d not in gone) for gone in (expand_a, expand_b, expand_c)]
    rest = "".join(x for d, x in enumerate(letters) if d not in summed)
    return torch.einsum(f"{','.join(names)}->{rest}", a, b, c)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten._is_all_true.default: torch.all,
    aten._is_any_true.default: torch.any,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten._trilinear.default: _trilinear,
}

"""Parts that the built-in models share: norms, rotary positions, attention, the loss, initialisation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "FusedAttention",
    "GroupedQueryAttention",
    "RMSNorm",
    "SwiGLU",
    "apply_rope",
    "cross_entropy",
    "init_parameters",
    "random_tokens",
    "repeat_kv",
    "rope_tables",
    "widen",
]


def widen(x: Tensor) -> Tensor:
    """`x` in float32 where it is narrower, as accumulations need."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, accumulated in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised `x`, in its dtype."""
        wide = widen(x)
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rope_tables(
    seq_len: int,
    head_dim: int,
    *,
    theta: float,
    factor: float,
    original_seq_len: int,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [seq_len, head_dim] in float32; `factor` above 1 slows low frequencies as Llama 3.1 does."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = 1.0 / theta**exponent
    if factor != 1.0:
        low_factor, high_factor = 1.0, 4.0
        turns = original_seq_len * frequency / (2 * math.pi)
        keep = ((turns - low_factor) / (high_factor - low_factor)).clamp(0.0, 1.0)
        frequency = frequency * (keep + (1 - keep) / factor)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [batch, heads, seq, head_dim] rotated by its positions, halves paired as in Hugging Face."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """Each key or value head [batch, kv_heads, seq, head_dim] for the `repeats` query heads that share it."""
    if repeats == 1:
        return x
    batch, heads, seq_len, head_dim = x.shape
    shared = x[:, :, None].expand(batch, heads, repeats, seq_len, head_dim)
    return shared.reshape(batch, heads * repeats, seq_len, head_dim)


class GroupedQueryAttention(nn.Module):
    """Causal attention with rotary positions and shared key/value heads; `qk_norm` adds Qwen3's norms over a head."""

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, *, qk_norm: bool, eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.repeats, self.head_dim = n_heads // n_kv_heads, head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False, dtype=dtype)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False, dtype=dtype)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False, dtype=dtype)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(head_dim, eps=eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=eps, dtype=dtype) if qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention over `x` [batch, seq, dim]."""
        batch, seq_len, _ = x.shape
        q = self.wq(x).view(batch, seq_len, -1, self.head_dim)
        k = self.wk(x).view(batch, seq_len, -1, self.head_dim)
        v = self.wv(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q = apply_rope(q.transpose(1, 2), cos, sin)
        k = repeat_kv(apply_rope(k.transpose(1, 2), cos, sin), self.repeats)
        out = F.scaled_dot_product_attention(q, k, repeat_kv(v, self.repeats), is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq_len, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False, dtype=dtype)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False, dtype=dtype)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The feed-forward of `x` [..., dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedAttention(nn.Module):
    """Attention with one projection for q, k and v, its rows ordered [head, (q, k, v), head_dim] as in Megatron.

    That order lets one contiguous shard of the projection hold whole heads; [(q, k, v), head, head_dim] would not.
    """

    def __init__(self, dim: int, n_heads: int, *, causal: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim, self.causal = dim // n_heads, causal
        self.c_attn = nn.Linear(dim, 3 * dim, dtype=dtype)
        self.c_proj = nn.Linear(dim, dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over `x` [batch, seq, dim]."""
        batch, seq_len, _ = x.shape
        heads = self.c_attn(x).view(batch, seq_len, -1, 3 * self.head_dim).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.c_proj(out.transpose(1, 2).reshape(batch, seq_len, -1))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [..., classes] against labels [...], in float32 at least."""
    return F.cross_entropy(widen(logits).flatten(0, -2), labels.flatten())


def random_tokens(batch: int, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens [batch, seq_len] and the token that follows each, on the default device."""
    text = torch.randint(0, vocab_size, (batch, seq_len + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@torch.no_grad()
def init_parameters(model: nn.Module, n_layers: int, *, residual: tuple[str, ...], std: float = 0.02) -> None:
    """GPT-2's initialisation: normal, smaller where a block writes to the residual stream; norms at identity."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            writes = any(part in residual for part in name.split("."))
            parameter.normal_(0.0, std / math.sqrt(2 * n_layers) if writes else std)

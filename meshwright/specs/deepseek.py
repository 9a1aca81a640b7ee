"""DeepSeek-V3: latent attention, a few dense layers, then mixtures of many small experts and a shared one.

Queries, keys and values come from low-rank latents; a part of each head carries rotary positions, and its key is shared
by all heads. Experts are scored by sigmoids and chosen among those of the best groups of experts; a bias, which is not
trained by gradients, moves the choice but not the weight. Expert capacity is fixed as in `mixtral`. There is no
multi-token prediction and no balancing loss, and positions are those of pre-training, without YaRN. Names within a
block follow the paper's W_DQ, W_UQ, W_DKV, W_UKV and W_O.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import RMSNorm, SwiGLU, apply_rope, widen
from .llama import Llama, LlamaBlock, LlamaConfig
from .mixtral import MixtralConfig, MixtureOfExperts

__all__ = ["CONFIG", "MODEL", "DeepSeek", "DeepSeekBlock", "DeepSeekConfig", "LatentAttention", "SharedAndRouted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekConfig(MixtralConfig):
    """Sizes of a DeepSeek-V3. `head_dim` is the part of a head with rotary positions, `plain_dim` the rest of it,
    `value_dim` a head's share of the output; `ffn_dim` is that of one expert, `dense_dim` of the dense layers."""

    query_rank: int
    latent_rank: int
    plain_dim: int
    value_dim: int
    dense_dim: int
    dense_layers: int = 3
    n_groups: int = 8
    top_groups: int = 4
    scale: float = 2.5
    rope_theta: float = 1e4
    norm_eps: float = 1e-6


class LatentAttention(nn.Module):
    """Causal multi-head latent attention."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.n_heads, self.rope_dim, self.value_dim = config.n_heads, config.head_dim, config.value_dim
        self.plain_dim, self.latent_rank = config.plain_dim, config.latent_rank
        heads, dtype, eps = config.n_heads, config.dtype, config.norm_eps
        wide = config.plain_dim + config.head_dim
        self.wq_down = nn.Linear(config.dim, config.query_rank, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(config.query_rank, eps=eps, dtype=dtype)
        self.wq_up = nn.Linear(config.query_rank, heads * wide, bias=False, dtype=dtype)
        self.wkv_down = nn.Linear(config.dim, config.latent_rank + config.head_dim, bias=False, dtype=dtype)
        self.kv_norm = RMSNorm(config.latent_rank, eps=eps, dtype=dtype)
        self.wkv_up = nn.Linear(
            config.latent_rank, heads * (config.plain_dim + config.value_dim), bias=False, dtype=dtype
        )
        self.wo = nn.Linear(heads * config.value_dim, config.dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention over `x` [batch, seq, dim]."""
        batch, seq_len, _ = x.shape
        q = self.wq_up(self.q_norm(self.wq_down(x))).view(batch, seq_len, self.n_heads, -1).transpose(1, 2)
        q_plain, q_rope = q.split([self.plain_dim, self.rope_dim], dim=-1)
        latent, k_rope = self.wkv_down(x).split([self.latent_rank, self.rope_dim], dim=-1)
        kv = self.wkv_up(self.kv_norm(latent)).view(batch, seq_len, self.n_heads, -1).transpose(1, 2)
        k_plain, v = kv.split([self.plain_dim, self.value_dim], dim=-1)
        k_rope = apply_rope(k_rope.view(batch, 1, seq_len, self.rope_dim), cos, sin)
        q = torch.cat((q_plain, apply_rope(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_plain, k_rope.expand(-1, self.n_heads, -1, -1)), dim=-1)
        # Fused attention wants values as wide as keys: zeros are added, and what they give is cut off.
        v = F.pad(v, (0, self.plain_dim + self.rope_dim - self.value_dim))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.value_dim]
        return self.wo(out.transpose(1, 2).reshape(batch, seq_len, -1))


class SharedAndRouted(MixtureOfExperts):
    """Routed experts, and one that every token passes."""

    bias: Tensor

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__(config)
        self.n_groups, self.top_groups, self.scale = config.n_groups, config.top_groups, config.scale
        self.shared = SwiGLU(config.dim, config.ffn_dim, dtype=config.dtype)
        self.register_buffer("bias", torch.zeros(config.n_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """The mixture and the shared expert for `x` [batch, seq, dim]."""
        return super().forward(x) + self.shared(x)

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token: [groups, group, top_k] both."""
        scores = widen(self.gate(tokens)).sigmoid()
        biased = scores + self.bias
        grouped = biased.unflatten(-1, (self.n_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        allowed = (best.unsqueeze(-1) == torch.arange(self.n_groups, device=best.device)).sum(-2) > 0
        experts = grouped.masked_fill(~allowed.unsqueeze(-1), 0.0).flatten(-2).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        return self.scale * weights / weights.sum(-1, keepdim=True), experts


class DeepSeekBlock(LlamaBlock):
    """One decoder layer with latent attention, dense or of experts."""

    def make_attention(self, config: LlamaConfig) -> nn.Module:
        """Latent attention."""
        assert isinstance(config, DeepSeekConfig)
        return LatentAttention(config)


class DenseBlock(DeepSeekBlock):
    """A dense decoder layer."""

    def make_feed_forward(self, config: LlamaConfig) -> nn.Module:
        """One wide feed-forward."""
        assert isinstance(config, DeepSeekConfig)
        return SwiGLU(config.dim, config.dense_dim, dtype=config.dtype)


class ExpertBlock(DeepSeekBlock):
    """A decoder layer of experts."""

    def make_feed_forward(self, config: LlamaConfig) -> nn.Module:
        """Routed experts and a shared one."""
        assert isinstance(config, DeepSeekConfig)
        return SharedAndRouted(config)


class DeepSeek(Llama):
    """Tokens and labels [batch, seq] to the mean loss, as Llama."""

    def make_block(self, config: LlamaConfig, number: int) -> nn.Module:
        """The first layers are dense."""
        assert isinstance(config, DeepSeekConfig)
        return DenseBlock(config) if number < config.dense_layers else ExpertBlock(config)

    def init_weights(self) -> None:
        """As Llama's, with a bias of zero for every expert."""
        super().init_weights()
        for name, buffer in self.named_buffers():
            if name.endswith(".bias"):
                buffer.zero_()


CONFIG = DeepSeekConfig
MODEL = DeepSeek

"""Mixtral: a Llama whose feed-forward is a mixture of experts with a fixed capacity, as in GShard.

Tokens are routed within groups of `group_size`. Each expert takes at most `capacity` tokens of a group; a choice beyond
it is dropped, first choices before second ones. Shapes are thus static, the experts compute
top_k * capacity_factor times a dense feed-forward of their size whatever their number, and dispatch and combine are two
matrix products that add group_size / ffn_dim of that. There is no load-balancing loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..plans.errors import RequestError
from .blocks import widen
from .llama import Llama, LlamaBlock, LlamaConfig

__all__ = ["CONFIG", "MODEL", "Mixtral", "MixtralBlock", "MixtralConfig", "MixtureOfExperts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Sizes of a Mixtral."""

    n_experts: int
    top_k: int = 2
    capacity_factor: float = 1.25
    group_size: int = 1024
    rope_theta: float = 1e6

    def __post_init__(self) -> None:
        if self.seq_len > self.group_size and self.seq_len % self.group_size:
            rule = f"'seq_len' must be at most {self.group_size} or a multiple of it, the routing group of the experts"
            raise RequestError(f"{rule}, got {self.seq_len}; round it")


class MixtureOfExperts(nn.Module):
    """Top-k routed SwiGLU experts with batched weights [experts, in, out]."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.n_experts, self.top_k = config.n_experts, config.top_k
        self.capacity_factor, self.group_size = config.capacity_factor, config.group_size
        wide, narrow = (config.n_experts, config.dim, config.ffn_dim), (config.n_experts, config.ffn_dim, config.dim)
        self.gate = nn.Linear(config.dim, config.n_experts, bias=False, dtype=config.dtype)
        self.w1 = nn.Parameter(torch.empty(wide, dtype=config.dtype))
        self.w2 = nn.Parameter(torch.empty(narrow, dtype=config.dtype))
        self.w3 = nn.Parameter(torch.empty(wide, dtype=config.dtype))

    def capacity(self, group: int) -> int:
        """Slots of one expert for a group of `group` tokens."""
        return min(group, math.ceil(group * self.top_k * self.capacity_factor / self.n_experts))

    def forward(self, x: Tensor) -> Tensor:
        """The mixture for `x` [batch, seq, dim]; a token with no free slot gets zero."""
        batch, seq_len, dim = x.shape
        group = min(self.group_size, seq_len)
        tokens = x.reshape(batch * (seq_len // group), group, dim)
        combine = self.route(tokens)
        dispatch = (combine > 0).to(x.dtype)
        slots = torch.bmm(dispatch.transpose(1, 2), tokens)
        out = torch.bmm(combine.to(x.dtype), self.experts(slots))
        return out.view(batch, seq_len, dim)

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token, the best first: [groups, group, top_k] both."""
        weights, experts = torch.topk(F.softmax(widen(self.gate(tokens)), dim=-1), self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts

    def route(self, tokens: Tensor) -> Tensor:
        """Weight of each slot for each token: [groups, group, experts * capacity], zero where it is not the token's."""
        groups, group, _ = tokens.shape
        capacity = self.capacity(group)
        weights, experts = self.choose(tokens)
        one_hot = (experts.unsqueeze(-1) == torch.arange(self.n_experts, device=tokens.device)).to(torch.int64)
        queue = one_hot.transpose(1, 2).reshape(groups, self.top_k * group, self.n_experts)
        ahead = queue.cumsum(dim=1) - queue  # first choices of the group come before all second ones
        position = (ahead * queue).sum(-1).view(groups, self.top_k, group).transpose(1, 2)
        weights = weights * (position < capacity)
        slot = experts * capacity + position.clamp(max=capacity - 1)
        chosen = slot.unsqueeze(-1) == torch.arange(self.n_experts * capacity, device=tokens.device)
        return (weights.unsqueeze(-1) * chosen).sum(dim=2)

    def experts(self, slots: Tensor) -> Tensor:
        """SwiGLU of each expert on its slots: [groups, experts * capacity, dim] in and out."""
        groups, count, dim = slots.shape
        capacity = count // self.n_experts
        x = slots.view(groups, self.n_experts, capacity, dim).transpose(0, 1)
        x = x.reshape(self.n_experts, groups * capacity, dim)
        x = torch.bmm(F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3), self.w2)
        x = x.view(self.n_experts, groups, capacity, dim).transpose(0, 1)
        return x.reshape(groups, count, dim)


class MixtralBlock(LlamaBlock):
    """One decoder layer with experts for its feed-forward."""

    def make_feed_forward(self, config: LlamaConfig) -> nn.Module:
        """The mixture of experts."""
        assert isinstance(config, MixtralConfig)
        return MixtureOfExperts(config)


class Mixtral(Llama):
    """Tokens and labels [batch, seq] to the mean loss, as Llama."""

    def make_block(self, config: LlamaConfig, number: int) -> nn.Module:
        """One decoder layer."""
        return MixtralBlock(config)


CONFIG = MixtralConfig
MODEL = Mixtral

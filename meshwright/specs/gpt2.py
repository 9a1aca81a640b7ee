"""GPT-2: learned positions, layer norms, tied embeddings. Names are those of Hugging Face, but h is called layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import FusedAttention, cross_entropy, init_parameters, random_tokens

__all__ = ["CONFIG", "GPT2", "GPT2MLP", "MODEL", "GPT2Block", "GPT2Config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2. There is no dropout: recent training from scratch uses none."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    max_positions: int
    seq_len: int
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.bfloat16


class GPT2MLP(nn.Module):
    """Feed-forward of four times the width with tanh-approximated GELU."""

    def __init__(self, dim: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, 4 * dim, dtype=dtype)
        self.c_proj = nn.Linear(4 * dim, dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The feed-forward of `x` [..., dim]."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class GPT2Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)
        self.attn = FusedAttention(config.dim, config.n_heads, causal=True, dtype=config.dtype)
        self.ln_2 = nn.LayerNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)
        self.mlp = GPT2MLP(config.dim, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [batch, seq, dim] after this layer."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Tokens and labels [batch, seq] to the mean loss; label i is the token that follows token i (no shift inside)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.dim, dtype=config.dtype)
        self.wpe = nn.Embedding(config.max_positions, config.dim, dtype=config.dtype)
        self.layers = nn.ModuleList(GPT2Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits [batch, seq, vocab]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the next token."""
        return cross_entropy(self.logits(tokens), labels)

    def init_weights(self) -> None:
        """Initialises the parameters where they are, for training from scratch (also after to_empty)."""
        init_parameters(self, self.config.n_layers, residual=("c_proj",))

    def example_inputs(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random (tokens, labels) on the default device."""
        return random_tokens(batch, self.config.seq_len, self.config.vocab_size)


CONFIG = GPT2Config
MODEL = GPT2

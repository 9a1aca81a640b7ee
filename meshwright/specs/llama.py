"""Llama: the decoder that llama3-*, qwen3-* and mixtral-* share. Names are those of Meta's and torchtitan's code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import (
    GroupedQueryAttention,
    RMSNorm,
    SwiGLU,
    cross_entropy,
    init_parameters,
    random_tokens,
    rope_tables,
)

__all__ = ["CONFIG", "MODEL", "Llama", "LlamaBlock", "LlamaConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama. `rope_factor` above 1 is the long-context scaling of Llama 3.1."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    seq_len: int
    rope_theta: float = 500000.0
    rope_factor: float = 1.0
    rope_original_seq_len: int = 8192
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16


class LlamaBlock(nn.Module):
    """One decoder layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention = self.make_attention(config)
        self.feed_forward = self.make_feed_forward(config)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)

    def make_attention(self, config: LlamaConfig) -> nn.Module:
        """The attention part; a family with another kind replaces it."""
        return GroupedQueryAttention(
            config.dim,
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            eps=config.norm_eps,
            dtype=config.dtype,
        )

    def make_feed_forward(self, config: LlamaConfig) -> nn.Module:
        """The feed-forward part; a mixture of experts replaces it."""
        return SwiGLU(config.dim, config.ffn_dim, dtype=config.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [batch, seq, dim] after this layer."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens and labels [batch, seq] to the mean loss; label i is the token that follows token i (no shift inside)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, dtype=config.dtype)
        self.layers = nn.ModuleList(self.make_block(config, number) for number in range(config.n_layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)
        self.output = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False, dtype=config.dtype)
        cos, sin = self._rope()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def make_block(self, config: LlamaConfig, number: int) -> nn.Module:
        """Decoder layer `number`, from 0 up."""
        return LlamaBlock(config)

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits [batch, seq, vocab]."""
        seq_len = tokens.shape[1]
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return F.linear(x, self.tok_embeddings.weight) if self.output is None else self.output(x)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the next token."""
        return cross_entropy(self.logits(tokens), labels)

    def init_weights(self) -> None:
        """Initialises parameters and rotary tables where they are, for training from scratch (also after to_empty)."""
        init_parameters(self, self.config.n_layers, residual=("wo", "w2"))
        cos, sin = self._rope(self.cos.device)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def example_inputs(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random (tokens, labels) on the default device."""
        return random_tokens(batch, self.config.seq_len, self.config.vocab_size)

    def _rope(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        config = self.config
        return rope_tables(
            config.seq_len,
            config.head_dim,
            theta=config.rope_theta,
            factor=config.rope_factor,
            original_seq_len=config.rope_original_seq_len,
            device=device,
        )


CONFIG = LlamaConfig
MODEL = Llama

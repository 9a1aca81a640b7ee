"""Qwen3 (dense): a Llama with norms on queries and keys and another rotary base."""

from __future__ import annotations

from dataclasses import dataclass

from .llama import Llama, LlamaConfig

__all__ = ["CONFIG", "MODEL", "Qwen3", "Qwen3Config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Sizes of a Qwen3."""

    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    qk_norm: bool = True


class Qwen3(Llama):
    """Tokens and labels [batch, seq] to the mean loss, as Llama."""


CONFIG = Qwen3Config
MODEL = Qwen3

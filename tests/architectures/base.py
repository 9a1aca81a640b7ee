"""What the tables of architectures share: sizes, and how a model is made from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

__all__ = ["BATCH", "TOKENS", "VOCAB", "Build", "Made", "causal", "ids", "made", "transformers"]

transformers: Any = pytest.importorskip("transformers")
VOCAB, BATCH, TOKENS = 101, 4, 12

Made = tuple[nn.Module, tuple, dict[str, Any]]
Build = Callable[[], Made]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def made(name: str, config: str, **options: Any) -> nn.Module:
    """The class `name` of transformers on a configuration of the class `config`, in training mode."""
    return getattr(transformers, name)(getattr(transformers, config)(**options)).train()


def ids(batch: int = BATCH, tokens: int = TOKENS) -> torch.Tensor:
    """Token ids (batch, tokens), none of them special."""
    return torch.randint(3, VOCAB, (batch, tokens))


def causal(stem: str, batch: int = BATCH, tokens: int = TOKENS, *, config: str = "", **options: Any) -> Build:
    """`stem`ForCausalLM with Llama's names of options, each of which `options` may change or, by None, leave out."""
    base = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **SPECIAL,
    )  # fmt: skip
    settings = {k: v for k, v in {**base, **options}.items() if v is not None}

    def build() -> Made:
        tokens_in = ids(batch, tokens)
        model = made(f"{stem}ForCausalLM", config or f"{stem}Config", **settings)
        return model, (), {"input_ids": tokens_in, "labels": tokens_in.clone(), "use_cache": False}

    return build

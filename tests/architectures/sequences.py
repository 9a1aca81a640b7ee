"""Sequence to sequence."""

from __future__ import annotations

from typing import Any

import torch

from .base import SPECIAL, VOCAB, Build, Made, ids, made

__all__ = ["SEQUENCES"]

PAIRED = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
    **SPECIAL,
)
RELATIVE = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)


def paired(stem: str, usual: dict[str, Any] = PAIRED, tail: str = "ForConditionalGeneration", **options: Any) -> Build:
    """An encoder and a decoder, on 12 tokens in and 7 out."""

    def build() -> Made:
        tokens = ids()
        model = made(stem + tail, f"{stem}Config", **{**usual, **options})
        return model, (), {"input_ids": tokens, "labels": tokens[:, :7].clone(), "use_cache": False}

    return build


def series(stem: str) -> Build:
    """A forecaster of time series."""

    def build() -> Made:
        model = made(
            f"{stem}ForPrediction",
            f"{stem}Config",
            num_input_channels=3,
            context_length=16,
            prediction_length=4,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=32,
            num_layers=2,
        )
        return model, (), {"past_values": torch.randn(4, 16, 3), "future_values": torch.randn(4, 4, 3)}

    return build


SEQUENCES: dict[str, Build] = {
    "t5": paired("T5", RELATIVE),
    "t5-gated": paired("T5", RELATIVE, feed_forward_proj="gated-gelu"),
    "mt5": paired("MT5", RELATIVE),
    "umt5": paired("UMT5", RELATIVE),
    "longt5-local": paired("LongT5", RELATIVE, local_radius=3),
    "longt5-global": paired(
        "LongT5", RELATIVE, local_radius=3, encoder_attention_type="transient-global", global_block_size=4
    ),
    "switch": paired(
        "SwitchTransformers",
        RELATIVE,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=16,
    ),
    "bart": paired("Bart"),
    "mbart": paired("MBart"),
    "pegasus": paired("Pegasus"),
    "blenderbot": paired("Blenderbot"),
    "marian": paired("Marian", tail="MTModel"),
    "m2m": paired("M2M100", encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    "m2m-layerdrop": paired("M2M100", encoder_layerdrop=0.5),
    "plbart": paired("PLBart"),
    "led": paired("LED", attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    "prophetnet": paired(
        "ProphetNet",
        dict(vocab_size=VOCAB, decoder_start_token_id=1, **SPECIAL),
        hidden_size=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
    ),
    "nllb-moe": paired("NllbMoe", num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=16),
    "patchtst": series("PatchTST"),
    "patchtsmixer": series("PatchTSMixer"),
}

"""Decoders of text."""

from __future__ import annotations

from typing import Any

import torch

from .base import SPECIAL, VOCAB, Build, Made, causal, ids, made

__all__ = ["LANGUAGE"]


def older(stem: str, **options: Any) -> Build:
    """A decoder whose configuration has its own names."""

    def build() -> Made:
        tokens = ids()
        model = made(
            f"{stem}LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM",
            f"{stem}Config",
            **{"vocab_size": VOCAB, **SPECIAL, **options},
        )
        return model, (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}

    return build


def padded() -> Made:
    """Llama with tied embeddings and a padded batch."""
    model, args, kwargs = causal("Llama", tie_word_embeddings=True)()
    return model, args, {**kwargs, "attention_mask": torch.tensor([[1] * 12] * 3 + [[1] * 8 + [0] * 4])}


LANGUAGE: dict[str, Build] = {
    "llama": causal("Llama"),
    "llama-padded": padded,
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=8),
    "gemma": causal("Gemma", head_dim=8),
    "gemma2": causal("Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": causal("Gemma3", config="Gemma3TextConfig", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "mistral": causal("Mistral", sliding_window=4, head_dim=8),
    "ministral": causal("Ministral", sliding_window=4, head_dim=8),
    "phi": causal("Phi", num_key_value_heads=None),
    "phi3": causal("Phi3", resid_pdrop=0.1, embd_pdrop=0.1),
    "olmo": causal("Olmo"),
    "olmo2": causal("Olmo2"),
    "olmo3": causal("Olmo3", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "gpt-neox": causal("GPTNeoX", num_key_value_heads=None, hidden_dropout=0.1),
    "falcon": older("Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False),
    "falcon-alibi": older(
        "Falcon",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "gpt2": older("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "opt": older(
        "OPT",
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "bloom": older("Bloom", hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.1),
    "gpt-j": older("GPTJ", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "gpt-neo": older(
        "GPTNeo",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    ),
    "gpt-bigcode": older("GPTBigCode", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "codegen": older("CodeGen", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "mpt": older("Mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "biogpt": older(
        "BioGpt",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    ),
    "xglm": older("XGLM", d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=64),
    "cohere": causal("Cohere"),
    "cohere2": causal("Cohere2", sliding_window=4),
    "starcoder2": causal("Starcoder2", sliding_window=4, residual_dropout=0.1),
    "stablelm": causal("StableLm"),
    "persimmon": causal("Persimmon", num_key_value_heads=None),
    "granite": causal("Granite"),
    "glm": causal("Glm", head_dim=8),
    "glm4": causal("Glm4", head_dim=8),
    "smollm3": causal("SmolLM3", no_rope_layers=[1, 0]),
    "nemotron": causal("Nemotron"),
    "exaone4": causal("Exaone4", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "helium": causal("Helium", head_dim=8),
    "diffllama": causal("DiffLlama"),
    "seed-oss": causal("SeedOss", head_dim=8),
    "arcee": causal("Arcee"),
    "apertus": causal("Apertus"),
    "minicpm3": causal(
        "MiniCPM3",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
    "nanochat": causal("NanoChat"),
    "bitnet": causal("BitNet"),
    "hunyuan": causal("HunYuanDenseV1", head_dim=8),
    "ernie4-5": causal("Ernie4_5", head_dim=8),
    "doge": causal("Doge"),
    "jais2": causal("Jais2", head_dim=8),
    "vaultgemma": causal("VaultGemma", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
}

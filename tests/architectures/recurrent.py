"""State spaces, linear attention and their mixtures with attention."""

from __future__ import annotations

from typing import Any

from .base import SPECIAL, VOCAB, Build, Made, causal, ids, made

__all__ = ["RECURRENT"]


def state_space(stem: str, *, batch: int = 2, name: str = "", **options: Any) -> Build:
    """A recurrent decoder whose configuration has its own names."""

    def build() -> Made:
        tokens = ids(batch)
        model = made(
            name or f"{stem}ForCausalLM",
            f"{stem}Config",
            **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, **SPECIAL, **options},
        )
        return model, (), {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}

    return build


SSD = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=4)

RECURRENT: dict[str, Build] = {
    "mamba": state_space("Mamba", state_size=4, time_step_rank=4),
    "mamba2": state_space("Mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "falcon-mamba": state_space("FalconMamba", state_size=4, time_step_rank=4),
    "nemotron-h": causal(
        "NemotronH",
        2,
        num_hidden_layers=4,
        hybrid_override_pattern="M*-M",
        head_dim=8,
        attention_head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=4,
    ),
    "nemotron-h-moe": causal(
        "NemotronH",
        2,
        num_hidden_layers=None,
        layers_block_type=["mamba", "moe", "attention", "moe"],
        head_dim=8,
        attention_head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "jamba": causal(
        "Jamba",
        2,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_d_conv=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "bamba": causal("Bamba", 2, attn_layer_indices=[1], **SSD),
    "falcon-h1": causal("FalconH1", 2, head_dim=8, mamba_d_ssm=64, **SSD),
    "granite-moe-hybrid": causal(
        "GraniteMoeHybrid",
        2,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        **SSD,
    ),
    "zamba": causal(
        "Zamba",
        2,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=4,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        use_mamba_kernels=False,
        attention_head_dim=16,
        num_key_value_heads=4,
    ),
    "zamba2": causal(
        "Zamba2",
        2,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=2,
        chunk_size=4,
        num_key_value_heads=4,
    ),
    "rwkv": state_space("Rwkv", attention_hidden_size=32, intermediate_size=64, context_length=16),
    "recurrent-gemma": causal(
        "RecurrentGemma",
        2,
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=4,
        head_dim=8,
        num_key_value_heads=1,
    ),
    "qwen3-next": causal(
        "Qwen3Next",
        2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "lfm2": causal("Lfm2", 2, layer_types=["conv", "full_attention"], block_ff_dim=64),
    "xlstm": state_space("xLSTM", embedding_dim=32, num_blocks=2, num_heads=4, chunk_size=4, mode="train"),
    "kimi-linear": causal("KimiLinear", 2),
}

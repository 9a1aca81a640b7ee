"""Mixtures of experts."""

from __future__ import annotations

from .base import Build, causal

__all__ = ["EXPERTS"]

LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, num_key_value_heads=4
)
ROUTED = dict(
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=1,
    first_k_dense_replace=1,
)

EXPERTS: dict[str, Build] = {
    "mixtral": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "mixtral-eager": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
    "mixtral-batched": causal(
        "Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm"
    ),
    "qwen2-moe": causal(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        output_router_logits=True,
    ),
    "qwen3-moe": causal(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, decoder_sparse_step=1
    ),
    "deepseek-v2": causal("DeepseekV2", **LATENT, **ROUTED),
    "deepseek-v3": causal("DeepseekV3", **LATENT, **ROUTED),
    "granite-moe": causal("GraniteMoe", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "granite-moe-shared": causal(
        "GraniteMoeShared", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16
    ),
    "gpt-oss": causal("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    "llama4": causal(
        "Llama4",
        config="Llama4TextConfig",
        num_local_experts=4,
        num_experts_per_tok=1,
        head_dim=8,
        intermediate_size_mlp=64,
        attention_chunk_size=4,
    ),
    "olmoe": causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "flex-olmo": causal("FlexOlmo", num_experts=4, num_experts_per_tok=2),
    "jetmoe": causal(
        "JetMoe",
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_channels=8,
        num_attention_heads=None,
        num_key_value_heads=2,
    ),
    "phimoe": causal("Phimoe", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-3": causal("Mixtral", num_local_experts=3, num_experts_per_tok=1),
    "glm4-moe": causal("Glm4Moe", head_dim=8, **ROUTED),
    "dots1": causal("Dots1", head_dim=8, **ROUTED),
    "minimax": causal(
        "MiniMax",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        block_size=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "minimax-m2": causal("MiniMaxM2", num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "ernie4-5-moe": causal(
        "Ernie4_5_Moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "afmoe": causal(
        "Afmoe",
        head_dim=8,
        sliding_window=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
        num_shared_experts=1,
    ),
    "lfm2-moe": causal(
        "Lfm2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
    ),
    "exaone-moe": causal(
        "ExaoneMoe",
        head_dim=8,
        sliding_window=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "glm4-moe-lite": causal("Glm4MoeLite", **LATENT, **ROUTED),
    "hunyuan-moe": causal("HunYuanMoEV1", num_experts=4, moe_topk=2, head_dim=8),
}

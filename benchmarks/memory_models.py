"""Models that predicted memory is held against: real architectures with random weights, on the meta device, in training
mode and with a loss, so large that parameters and activations both count. Some are bound by logits (gpt2), some by
attention scores (gemma2, t5), one by images (resnet), one by its parameters (bert)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["MODELS", "Build", "loss_for"]

Build = Callable[[], tuple[nn.Module, tuple, dict[str, Any]]]
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = dict(
    vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=512, **_IDS,
)  # fmt: skip


def _made(name: str, config: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, name)(getattr(transformers, config)(**options)).train()


def _ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.empty((batch, tokens), dtype=torch.long, device="meta")


def _decoder(name: str, config: str, batch: int = 8, tokens: int = 128, **options: Any) -> Build:
    """A decoder on (batch, tokens) ids; options that are None are left out."""
    settings = {k: v for k, v in {**_DECODER, **options}.items() if v is not None}

    def build() -> tuple[nn.Module, tuple, dict[str, Any]]:
        tokens_in = _ids(batch, tokens)
        return _made(name, config, **settings), (), {"input_ids": tokens_in, "labels": tokens_in, "use_cache": False}

    return build


def _gpt2() -> tuple[nn.Module, tuple, dict[str, Any]]:
    ids = _ids(4, 128)
    model = _made("GPT2LMHeadModel", "GPT2Config", n_embd=128, n_layer=2, n_head=4, n_positions=128, **_IDS)
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _bert() -> tuple[nn.Module, tuple, dict[str, Any]]:
    ids = _ids(4, 64)
    model = _made("BertForMaskedLM", "BertConfig", vocab_size=8192, hidden_size=512, num_hidden_layers=2,
                  num_attention_heads=8, intermediate_size=2048)  # fmt: skip
    return model, (), {"input_ids": ids, "attention_mask": torch.empty_like(ids), "labels": ids}


def _t5() -> tuple[nn.Module, tuple, dict[str, Any]]:
    model = _made("T5ForConditionalGeneration", "T5Config", vocab_size=4096, d_model=256, d_kv=32, d_ff=512,
                  num_layers=2, num_heads=8, decoder_start_token_id=0)  # fmt: skip
    return model, (), {"input_ids": _ids(4, 256), "labels": _ids(4, 128), "use_cache": False}


def _vit() -> tuple[nn.Module, tuple, dict[str, Any]]:
    model = _made("ViTForImageClassification", "ViTConfig", hidden_size=256, num_hidden_layers=2, patch_size=8,
                  num_attention_heads=8, intermediate_size=1024, image_size=128, num_labels=1000)  # fmt: skip
    images, labels = torch.empty(12, 3, 128, 128, device="meta"), torch.empty(12, dtype=torch.long, device="meta")
    return model, (), {"pixel_values": images, "labels": labels}


def _resnet() -> tuple[nn.Module, tuple, dict[str, Any]]:
    model = _made("ResNetForImageClassification", "ResNetConfig", embedding_size=64, hidden_sizes=[128, 256, 512],
                  depths=[1, 1, 1], layer_type="bottleneck", num_labels=1000)  # fmt: skip
    images, labels = torch.empty(12, 3, 64, 64, device="meta"), torch.empty(12, dtype=torch.long, device="meta")
    return model, (), {"pixel_values": images, "labels": labels}


def _whisper() -> tuple[nn.Module, tuple, dict[str, Any]]:
    model = _made("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=4096, d_model=256, encoder_layers=2,
                  decoder_layers=2, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=1024,
                  decoder_ffn_dim=1024, num_mel_bins=80, max_source_positions=128, max_target_positions=64,
                  decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **_IDS)  # fmt: skip
    sound = torch.empty(4, 80, 256, device="meta")
    return model, (), {"input_features": sound, "labels": _ids(4, 48), "use_cache": False}


def _mamba() -> tuple[nn.Module, tuple, dict[str, Any]]:
    ids = _ids(4, 16)
    model = _made("MambaForCausalLM", "MambaConfig", vocab_size=2048, hidden_size=256, num_hidden_layers=1,
                  state_size=16, time_step_rank=16, **_IDS)  # fmt: skip
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


class _Recurrent(nn.Module):
    """Embedding, a two-layer LSTM, logits and their loss."""

    def __init__(self, vocab: int = 2048, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.lstm(self.embed(ids))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _lstm() -> tuple[nn.Module, tuple, dict[str, Any]]:
    with torch.device("meta"):
        return _Recurrent(), (_ids(16, 12), _ids(16, 12)), {}


def loss_for(name: str) -> Callable[[Any], torch.Tensor] | None:
    """The loss that the model called `name` is trained with. Two give out their logits beside it, and a gradient of
    these is taken, too."""
    return None if name in ("bert", "lstm") else lambda output: output.loss


# Name: how it is built, and the mesh that it is planned on; three devices make pieces uneven.
MODELS: dict[str, tuple[Build, str]] = {
    "llama": (_decoder("LlamaForCausalLM", "LlamaConfig"), "4"),
    "gpt2": (_gpt2, "2x2"),
    "mixtral": (_decoder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2), "2x2"),
    "vit": (_vit, "3"),
    "t5": (_t5, "4"),
    "mamba": (_mamba, "2"),
    "resnet": (_resnet, "3"),
    "lstm": (_lstm, "2"),
    "bert": (_bert, "2x2"),
    "whisper": (_whisper, "4"),
    "deepseek": (
        _decoder(
            "DeepseekV3ForCausalLM", "DeepseekV3Config", q_lora_rank=128, kv_lora_rank=64, qk_rope_head_dim=16,
            qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=8, n_routed_experts=8, n_group=2, topk_group=1,
            num_experts_per_tok=2, moe_intermediate_size=128, n_shared_experts=1, first_k_dense_replace=1,
        ),
        "2x2",
    ),
    "gemma2": (
        _decoder("Gemma2ForCausalLM", "Gemma2Config", 4, 256, head_dim=32, query_pre_attn_scalar=32, sliding_window=64),
        "3",
    ),
    "qwen3": (_decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=32, vocab_size=8191), "3"),
}  # fmt: skip

"""Several kinds of input."""

from __future__ import annotations

from typing import Any

import torch

from .base import VOCAB, Build, Made, ids, transformers

__all__ = ["MULTIMODAL"]

EYES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
)
WORDS = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
)


def contrasted(stem: str, *, text: dict[str, Any] | None = None, **options: Any) -> Build:
    """Images and texts side by side with a contrastive loss."""

    def build() -> Made:
        words = {**WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **(text or {})}
        config = getattr(transformers, f"{stem}Config")(
            text_config=words, vision_config=EYES, projection_dim=16, **options
        )
        model = getattr(transformers, f"{stem}Model")(config).train()
        tokens = ids()
        tokens[:, -1] = 2
        return model, (), {"input_ids": tokens, "pixel_values": torch.randn(4, 3, 16, 16), "return_loss": True}

    return build


def seeing(stem: str, text: Any, vision: Any, *, tokens: int = 16, name: str = "", **options: Any) -> Build:
    """A decoder that reads image features in place of image tokens (id 99)."""

    def build() -> Made:
        config = getattr(transformers, f"{stem}Config")(
            text_config=text(), vision_config=vision(), image_token_id=99, image_token_index=99, **options
        )
        model = getattr(transformers, name or f"{stem}ForConditionalGeneration")(config).train()
        words = torch.randint(3, 90, (2, tokens + 6))
        words[:, 2 : 2 + tokens] = 99
        labels = words.clone()
        labels[:, : 2 + tokens] = -100
        return (
            model,
            (),
            {
                "input_ids": words,
                "pixel_values": torch.randn(2, 3, 16, 16),
                "attention_mask": torch.ones_like(words),
                "labels": labels,
                "use_cache": False,
            },
        )

    return build


def llama_text() -> Any:
    return transformers.LlamaConfig(**WORDS, num_key_value_heads=2)


def clip_vision() -> Any:
    return transformers.CLIPVisionConfig(**EYES)


def siglip_vision() -> Any:
    return transformers.SiglipVisionConfig(**EYES, vision_use_head=False)


def qwen2_vl() -> Made:
    """Patches are flattened and packed; where each image starts is known by its grid."""
    text = dict(
        **WORDS,
        num_key_value_heads=2,
        rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"},
    )
    vision = dict(
        depth=2,
        embed_dim=32,
        hidden_size=32,
        num_heads=4,
        patch_size=4,
        mlp_ratio=2,
        spatial_merge_size=2,
        temporal_patch_size=2,
    )
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=99,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config).train()
    words = torch.randint(3, 90, (2, 12))
    words[:, 2], words[:, 3:7] = 97, 99
    return (
        model,
        (),
        {
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "pixel_values": torch.randn(32, 3 * 2 * 16),
            "mm_token_type_ids": (words == 99).int(),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
            "labels": words.clone(),
            "use_cache": False,
        },
    )


def vilt() -> Made:
    model = transformers.ViltForQuestionAnswering(
        transformers.ViltConfig(**WORDS, image_size=16, patch_size=4, num_labels=5, max_image_length=-1)
    ).train()
    return model, (), {"input_ids": ids(2), "pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.rand(2, 5)}


def blip() -> Made:
    words = {
        **WORDS,
        "encoder_hidden_size": 32,
        "is_decoder": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "sep_token_id": 2,
        "eos_token_id": 2,
    }
    config = transformers.BlipConfig(
        text_config=words, vision_config=EYES, projection_dim=16, image_text_hidden_size=32
    )
    model = transformers.BlipForConditionalGeneration(config).train()
    tokens = ids(2)
    return model, (), {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16), "labels": tokens.clone()}


def captioner() -> Made:
    """A ViT and a GPT-2 with cross attention."""
    eyes = transformers.ViTConfig(**EYES)
    mouth = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        add_cross_attention=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        eyes, mouth, decoder_start_token_id=1, pad_token_id=0
    )
    model = transformers.VisionEncoderDecoderModel(config=config).train()
    return model, (), {"pixel_values": torch.randn(2, 3, 16, 16), "labels": ids(2), "use_cache": False}


def document() -> Made:
    """LayoutLMv3: words, their boxes and the page."""
    config = transformers.LayoutLMv3Config(
        **WORDS,
        coordinate_size=6,
        shape_size=4,
        input_size=16,
        patch_size=4,
        num_labels=5,
        max_2d_position_embeddings=64,
        pad_token_id=1,
        rel_pos_bins=8,
        rel_2d_pos_bins=8,
    )
    model = transformers.LayoutLMv3ForTokenClassification(config).train()
    corners = torch.randint(0, 30, (2, 12, 2))
    boxes = torch.cat([corners, corners + torch.randint(1, 30, (2, 12, 2))], -1)
    return (
        model,
        (),
        {
            "input_ids": ids(2),
            "bbox": boxes,
            "pixel_values": torch.randn(2, 3, 16, 16),
            "labels": torch.randint(0, 5, (2, 12)),
        },
    )


MULTIMODAL: dict[str, Build] = {
    "clip": contrasted("CLIP"),
    "siglip": contrasted("Siglip"),
    "llava": seeing("Llava", llama_text, clip_vision, vision_feature_select_strategy="default"),
    "paligemma": seeing(
        "PaliGemma",
        lambda: transformers.GemmaConfig(**WORDS, num_key_value_heads=2, head_dim=8),
        siglip_vision,
        projection_dim=32,
    ),
    "internvl": seeing(
        "InternVL",
        llama_text,
        lambda: transformers.InternVLVisionConfig(**{**EYES, "image_size": [16, 16], "patch_size": [4, 4]}),
        tokens=4,
        downsample_ratio=0.5,
    ),
    "qwen2-vl": qwen2_vl,
    "vilt": vilt,
    "blip": blip,
    "captioner": captioner,
    "layoutlmv3": document,
}

"""Images and videos."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .base import Build, Made, made, transformers

__all__ = ["VISION"]

USUAL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    image_size=16,
    patch_size=4,
    num_labels=5,
)


def classifier(stem: str, usual: dict[str, Any] = USUAL, *, size: int = 16, **options: Any) -> Build:
    """`stem`ForImageClassification."""

    def build() -> Made:
        model = made(f"{stem}ForImageClassification", f"{stem}Config", **{**usual, **options})
        return model, (), {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(0, 5, (4,))}

    return build


STAGES = dict(num_labels=5)


def segmenter(stem: str, *, size: int = 32, **options: Any) -> Build:
    """`stem`ForSemanticSegmentation."""

    def build() -> Made:
        model = made(f"{stem}ForSemanticSegmentation", f"{stem}Config", **{"num_labels": 5, **options})
        return (
            model,
            (),
            {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, 5, (2, size, size))},
        )

    return build


def autoencoder() -> Made:
    """A masked autoencoder; the noise that masks is given."""
    model = made(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        **{
            **USUAL,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    )
    return model, (), {"pixel_values": torch.randn(4, 3, 16, 16), "noise": torch.rand(4, 16)}


def autoencoder_drawn() -> Made:
    """The same, its noise drawn in the model."""
    model, args, kwargs = autoencoder()
    return model, args, {"pixel_values": kwargs["pixel_values"]}


def video(stem: str, **options: Any) -> Build:
    """`stem`ForVideoClassification on 4 frames."""

    def build() -> Made:
        model = made(f"{stem}ForVideoClassification", f"{stem}Config", **{**USUAL, "num_frames": 4, **options})
        return model, (), {"pixel_values": torch.randn(2, 4, 3, 16, 16), "labels": torch.randint(0, 5, (2,))}

    return build


def video_autoencoder() -> Made:
    config = {
        **USUAL,
        "num_frames": 4,
        "tubelet_size": 2,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
    }
    model = made("VideoMAEForPreTraining", "VideoMAEConfig", **config)
    hidden = torch.zeros(2, 32, dtype=torch.bool)
    hidden[:, 8:] = True
    return model, (), {"pixel_values": torch.randn(2, 4, 3, 16, 16), "bool_masked_pos": hidden}


def masked_image(stem: str, usual: dict[str, Any] = USUAL, **options: Any) -> Build:
    """`stem`ForMaskedImageModeling."""

    def build() -> Made:
        model = made(f"{stem}ForMaskedImageModeling", f"{stem}Config", **{**usual, "encoder_stride": 4, **options})
        hidden = torch.rand(4, 16) > 0.5
        return model, (), {"pixel_values": torch.randn(4, 3, 16, 16), "bool_masked_pos": hidden}

    return build


def backbone(**options: Any) -> Any:
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"], **options
    )


class Sum(nn.Module):
    """A model whose loss is the mean square of some outputs."""

    def __init__(self, model: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, **inputs: Any) -> torch.Tensor:
        out = self.model(**inputs)
        return sum((out[name].square().mean() for name in self.outputs), torch.zeros(()))  # type: ignore[return-value]


def detector(stem: str, **options: Any) -> Build:
    """A detector by its raw outputs: the matching of its loss runs on values."""

    def build() -> Made:
        model = made(
            f"{stem}ForObjectDetection",
            f"{stem}Config",
            **{
                "use_timm_backbone": False,
                "use_pretrained_backbone": False,
                "backbone_config": backbone(),
                "backbone": None,
                "num_queries": 5,
                "d_model": 16,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "decoder_ffn_dim": 32,
                "num_labels": 4,
                **options,
            },
        )
        return Sum(model, "logits", "pred_boxes"), (), {"pixel_values": torch.randn(2, 3, 32, 32)}

    return build


def yolos() -> Made:
    model = made(
        "YolosForObjectDetection", "YolosConfig", **{**USUAL, "image_size": [16, 16], "num_detection_tokens": 5}
    )
    return Sum(model, "logits", "pred_boxes"), (), {"pixel_values": torch.randn(2, 3, 16, 16)}


class Denoiser(nn.Module):
    """A diffusion model and the loss of one step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, noise: torch.Tensor, *rest: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ("timestep", "class_labels")
        return {"loss": F.mse_loss(self.net(x, **dict(zip(names, rest, strict=False))).sample, noise)}


def dit() -> Made:
    diffusers = pytest.importorskip("diffusers")
    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    image = torch.randn(2, 4, 8, 8)
    return Denoiser(net), (image, torch.randn_like(image), torch.tensor([5, 700]), torch.tensor([1, 2])), {}


def unet() -> Made:
    diffusers = pytest.importorskip("diffusers")
    net = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    image = torch.randn(2, 3, 8, 8)
    return Denoiser(net), (image, torch.randn_like(image), torch.tensor([5, 700])), {}


VISION: dict[str, Build] = {
    "vit": classifier("ViT"),
    "deit": classifier("DeiT"),
    "beit": classifier(
        "Beit", use_relative_position_bias=True, use_absolute_position_embeddings=False, drop_path_rate=0.1
    ),
    "beit-shared": classifier("Beit", use_shared_relative_position_bias=True, layer_scale_init_value=0.1),
    "data2vec-vision": classifier("Data2VecVision"),
    "dinov2": classifier("Dinov2", mlp_ratio=2, drop_path_rate=0.1),
    "dinov2-registers": classifier("Dinov2WithRegisters", mlp_ratio=2, use_swiglu_ffn=True),
    "vit-msn": classifier("ViTMSN"),
    "ijepa": classifier("IJepa"),
    "hiera": classifier(
        "Hiera",
        embed_dim=16,
        image_size=[32, 32],
        patch_size=[7, 7],
        size=32,
        depths=[1, 1],
        num_heads=[1, 2],
        num_query_pool=1,
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
    ),
    "swin": classifier(
        "Swin",
        STAGES,
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=2,
        drop_path_rate=0.1,
    ),
    "swinv2": classifier(
        "Swinv2", STAGES, image_size=16, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2
    ),
    "pvt": classifier(
        "Pvt",
        image_size=32,
        size=32,
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        num_attention_heads=[2, 4],
        sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    "pvt-v2": classifier(
        "PvtV2",
        image_size=32,
        size=32,
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        num_attention_heads=[2, 4],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    "segformer": classifier(
        "Segformer",
        STAGES,
        size=32,
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        num_attention_heads=[2, 4],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    "segformer-pixels": segmenter(
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        num_attention_heads=[2, 4],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    "convnext": classifier(
        "ConvNext", STAGES, size=32, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, drop_path_rate=0.1
    ),
    "convnextv2": classifier("ConvNextV2", STAGES, size=32, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "resnet": classifier(
        "ResNet", STAGES, size=32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck"
    ),
    "regnet": classifier(
        "RegNet", STAGES, size=32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4
    ),
    "mobilenet-v1": classifier("MobileNetV1", STAGES, size=32, depth_multiplier=0.25, min_depth=8),
    "mobilenet-v2": classifier(
        "MobileNetV2", STAGES, size=32, depth_multiplier=0.25, depth_divisible_by=4, min_depth=4
    ),
    "efficientnet": classifier(
        "EfficientNet",
        STAGES,
        size=32,
        width_coefficient=0.25,
        depth_coefficient=0.25,
        in_channels=[32, 16],
        out_channels=[16, 24],
        kernel_sizes=[3, 5],
        depthwise_padding=[],
        strides=[1, 2],
        num_block_repeats=[1, 2],
        expand_ratios=[1, 6],
        hidden_dim=320,
        depth_divisor=8,
    ),
    "mobilevit": classifier(
        "MobileViT",
        STAGES,
        size=32,
        image_size=32,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
        num_attention_heads=2,
        expand_ratio=2.0,
        last_hidden_size=16,
        num_hidden_layers=1,
    ),
    "poolformer": classifier(
        "PoolFormer",
        STAGES,
        size=32,
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        mlp_ratio=2.0,
    ),
    "focalnet": classifier(
        "FocalNet",
        STAGES,
        size=32,
        image_size=32,
        embed_dim=16,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    "levit": classifier(
        "Levit",
        STAGES,
        size=64,
        image_size=64,
        hidden_sizes=[16, 32, 48],
        num_attention_heads=[2, 4, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    "cvt": classifier(
        "Cvt",
        STAGES,
        size=32,
        embed_dim=[16, 32],
        num_heads=[2, 4],
        depth=[1, 2],
        patch_sizes=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[2, 1],
        mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0],
        drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.1],
        qkv_bias=[True, True],
        cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"],
        kernel_qkv=[3, 3],
        padding_kv=[1, 1],
        stride_kv=[2, 2],
        padding_q=[1, 1],
        stride_q=[1, 1],
    ),
    "swiftformer": classifier(
        "SwiftFormer",
        STAGES,
        size=64,
        image_size=64,
        depths=[1, 1],
        embed_dims=[16, 32],
        mlp_ratio=2,
        downsamples=[True, True],
    ),
    "bit": classifier("Bit", STAGES, size=32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4),
    "mae": autoencoder,
    "mae-drawn": autoencoder_drawn,
    "vit-masked": masked_image("ViT"),
    "swin-masked": masked_image(
        "Swin", STAGES, embed_dim=16, image_size=16, patch_size=4, depths=[1], num_heads=[2], window_size=2
    ),
    "videomae": video("VideoMAE", tubelet_size=2),
    "timesformer": video("Timesformer"),
    "vivit": video("Vivit", tubelet_size=[2, 4, 4]),
    "videomae-masked": video_autoencoder,
    "beit-pixels": segmenter(
        "Beit", size=16, **{**USUAL, "use_auxiliary_head": False, "num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]}
    ),
    "dpt": segmenter(
        "DPT",
        size=32,
        **{
            **USUAL,
            "image_size": 32,
            "patch_size": 16,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [4, 8, 8, 8],
            "fusion_hidden_size": 8,
            "use_auxiliary_head": False,
            "num_hidden_layers": 4,
        },
    ),
    "detr": detector("Detr"),
    "conditional-detr": detector("ConditionalDetr"),
    "deformable-detr": detector("DeformableDetr", num_feature_levels=1, d_model=32, decoder_layers=2),
    "yolos": yolos,
    "dit": dit,
    "unet": unet,
}

"""Vision Transformer: image patches to a class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import FusedAttention, cross_entropy, init_parameters

__all__ = ["CONFIG", "MODEL", "ViT", "ViTBlock", "ViTConfig", "ViTMLP"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """Sizes of a ViT. There is no dropout."""

    image_size: int
    patch_size: int
    dim: int
    n_layers: int
    n_heads: int
    mlp_dim: int
    n_classes: int
    n_channels: int = 3
    norm_eps: float = 1e-6
    dtype: torch.dtype = torch.bfloat16


class ViTMLP(nn.Module):
    """Feed-forward with GELU."""

    def __init__(self, dim: int, mlp_dim: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, mlp_dim, dtype=dtype)
        self.c_proj = nn.Linear(mlp_dim, dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The feed-forward of `x` [..., dim]."""
        return self.c_proj(F.gelu(self.c_fc(x)))


class ViTBlock(nn.Module):
    """One encoder layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)
        self.attn = FusedAttention(config.dim, config.n_heads, causal=False, dtype=config.dtype)
        self.ln_2 = nn.LayerNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)
        self.mlp = ViTMLP(config.dim, config.mlp_dim, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [batch, 1 + patches, dim] after this layer."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """Pixels [batch, channels, height, width] and class labels [batch] to the mean loss."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        patches = (config.image_size // config.patch_size) ** 2
        size = config.patch_size
        self.patch_embed = nn.Conv2d(config.n_channels, config.dim, size, stride=size, dtype=config.dtype)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim, dtype=config.dtype))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, config.dim, dtype=config.dtype))
        self.layers = nn.ModuleList(ViTBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps, dtype=config.dtype)
        self.head = nn.Linear(config.dim, config.n_classes, dtype=config.dtype)

    def logits(self, pixels: Tensor) -> Tensor:
        """Class logits [batch, classes]."""
        x = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the class."""
        return cross_entropy(self.logits(pixels), labels)

    def init_weights(self) -> None:
        """Initialises the parameters where they are, for training from scratch (also after to_empty)."""
        init_parameters(self, self.config.n_layers, residual=("c_proj",))

    def example_inputs(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random (pixels, labels) on the default device."""
        config = self.config
        pixels = torch.randn(batch, config.n_channels, config.image_size, config.image_size, dtype=config.dtype)
        return pixels, torch.randint(0, config.n_classes, (batch,))


CONFIG = ViTConfig
MODEL = ViT

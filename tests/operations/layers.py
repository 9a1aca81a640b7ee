"""Layers of torch.nn: recurrent ones, attention, embeddings, convolutions, normalisations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .base import WIDTH, After, Build, Made, after, layer

__all__ = ["LAYERS"]


class Packed(nn.Module):
    """A recurrent layer on sequences of several lengths."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(4, 6, batch_first=True, **options)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


def packed(kind: type[nn.Module], **options: Any) -> Build:
    return lambda: (Packed(kind, **options), (torch.randn(3, 5, 4), torch.tensor([5, 2, 4])), {})


class Cells(nn.Module):
    """A loop over time by recurrent cells."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(4, 6), nn.GRUCell(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = g = x.new_zeros(x.shape[0], 6)
        for at in x.unbind(1):
            h, c = self.lstm(at, (h, c))
            g = self.gru(h, g)
        return g


class Attention(nn.Module):
    """nn.MultiheadAttention with a mask of each kind that it takes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, padding: torch.Tensor) -> Any:
        return self.layer(x, y, y, attn_mask=mask, key_padding_mask=padding)


def attention(boolean: bool, **options: Any) -> Build:
    def build() -> Made:
        mask = torch.rand(5, 7) > 0.8 if boolean else torch.randn(5, 7)
        padding = torch.zeros(3, 7, dtype=torch.bool)
        padding[1, 5:] = True
        padding = padding if boolean else torch.zeros(3, 7).masked_fill(padding, float("-inf"))
        widths = options.get("kdim", 8)
        return Attention(**options), (torch.randn(3, 5, 8), torch.randn(3, 7, widths), mask, padding), {}

    return build


class Bags(nn.Module):
    """Bags of embeddings in every mode, one with weights per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.EmbeddingBag(11, 4, mode="sum")
        self.mean = nn.EmbeddingBag(11, 4, mode="mean", padding_idx=2)
        self.top = nn.EmbeddingBag(11, 4, mode="max")

    def forward(self, ids: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.total(ids, starts, weights) + self.mean(ids, starts) + self.top(ids, starts)


class Normed(nn.Module):
    """A stack of layers with a normalisation that holds running statistics."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def parametrized() -> Made:
    """Weights computed from others, by every way that PyTorch has."""
    parts = nn.utils.parametrizations
    model = nn.Sequential(
        parts.weight_norm(nn.Linear(6, 8)), nn.Tanh(), parts.spectral_norm(nn.Linear(8, 8), n_power_iterations=2),
        nn.Tanh(), parts.weight_norm(nn.Linear(8, 4), dim=None),
    )  # fmt: skip
    return model, (torch.randn(5, 6),), {}


def orthogonal() -> Made:
    made = nn.utils.parametrizations.orthogonal
    return nn.Sequential(made(nn.Linear(6, 6)), made(nn.Linear(6, 4), "weight", "cayley")), (torch.randn(5, 6),), {}


def flexible(kind: str) -> Build:
    """Flex attention with a score of its own, with a mask of blocks, or with fewer heads of keys."""

    def build() -> Made:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        kv = 2 if kind == "gqa" else 4

        def run(x: torch.Tensor, bias: torch.Tensor) -> Any:
            q = x.unflatten(-1, (4, 4)).transpose(1, 2)
            k, v = q[:, :kv] * 2, q[:, :kv].cos()
            q, k, v = q.detach(), k.detach(), v.detach()  # it has no backward on a CPU
            if kind == "score":
                return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j))
            if kind == "mask":
                mask = create_block_mask(lambda b, h, i, j: i >= j, 2, None, 10, 10, device="cpu")
                return flex_attention(q, k, v, block_mask=mask)
            return flex_attention(q, k, v, enable_gqa=True, scale=0.3)

        def beside(x: torch.Tensor, bias: torch.Tensor) -> Any:
            return x * run(x, bias).transpose(1, 2).flatten(2)

        return After(beside, 16), (torch.randn(2, 10, 16), torch.randn(4)), {}

    return build


LAYERS: dict[str, Build] = {
    "lstm": layer(lambda: nn.LSTM(4, 6, 2, bidirectional=True, dropout=0.2, batch_first=True), (3, 5, 4)),
    "lstm-projected": layer(lambda: nn.LSTM(4, 6, proj_size=3), (5, 3, 4)),
    "gru": layer(lambda: nn.GRU(4, 6, 2, bidirectional=True), (5, 3, 4)),
    "rnn": layer(lambda: nn.RNN(4, 6, nonlinearity="relu"), (5, 3, 4)),
    "lstm-packed": packed(nn.LSTM, bidirectional=True),
    "gru-packed": packed(nn.GRU),
    "rnn-packed": packed(nn.RNN),
    "cells": layer(Cells, (3, 4, 4)),
    "multihead": attention(True),
    "multihead-float": attention(False, dropout=0.1, add_bias_kv=True, add_zero_attn=True),
    "multihead-apart": attention(True, kdim=5, vdim=5),
    "transformer": layer(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (3, 5, 8), (3, 4, 8)),
    "flex-score": flexible("score"),
    "flex-mask": flexible("mask"),
    "flex-gqa": flexible("gqa"),
    "bags": lambda: (Bags(), (torch.randint(0, 11, (9,)), torch.tensor([0, 2, 2, 6]), torch.randn(9)), {}),
    "transposed-1d": layer(lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1), (3, 4, 5)),
    "transposed-2d": layer(lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), (3, 4, 5, 4)),
    "transposed-3d": layer(lambda: nn.ConvTranspose3d(3, 4, 2, 2), (2, 3, 2, 3, 2)),
    "conv-1d-circular": layer(lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (3, 4, 7)),
    "conv-2d-same": layer(lambda: nn.Conv2d(4, 6, 4, padding="same", dilation=2), (3, 4, 7, 5)),
    "conv-3d": layer(lambda: nn.Conv3d(3, 4, 2, padding=1, groups=1), (2, 3, 3, 4, 3)),
    "unfold-fold": after(
        lambda x: F.fold(F.unfold(x, 2, stride=2) * 2, (4, 6), 2, stride=2) + F.unfold(x, 3).sum(), 3, 2, 4, WIDTH
    ),
    "grid-sample": after(
        lambda x, g: (F.grid_sample(x, g, align_corners=False), F.grid_sample(x, g, "nearest", "border", True)),
        3,
        2,
        4,
        WIDTH,
        rest=lambda: (torch.rand(3, 5, 3, 2) * 2 - 1,),
    ),
    "grid-sample-3d": after(
        lambda x, g: F.grid_sample(x, g, align_corners=True),
        2,
        2,
        3,
        3,
        WIDTH,
        rest=lambda: (torch.rand(2, 2, 3, 2, 3) * 2 - 1,),
    ),
    "affine-grid": after(lambda x: F.affine_grid(x.view(5, 2, 3), [5, 1, 3, 4], align_corners=False)),
    "interpolate": after(
        lambda x: [
            F.interpolate(x, (7, 5), mode=m) for m in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
        ],
        3,
        2,
        4,
        WIDTH,
    ),
    "interpolate-1d-3d": after(
        lambda x: (
            F.interpolate(x, 9, mode="linear", align_corners=True),
            F.interpolate(x.view(3, 1, 2, 2, WIDTH), (3, 3, 4), mode="trilinear"),
            F.interpolate(x.view(3, 2, 2, WIDTH), (3, 3), mode="bilinear", antialias=True),
        ),
        3,
        4,
        WIDTH,
    ),
    "pixel-shuffle": after(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2) * 2, 2).cos(), 3, 4, 3, WIDTH),
    "pools": after(
        lambda x: (
            F.max_pool2d(x, 2, ceil_mode=True),
            F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            F.lp_pool2d(x.abs(), 2, 2),
            F.adaptive_max_pool2d(x, (2, 3)),
            F.adaptive_avg_pool2d(x, (3, 2)),
        ),
        3,
        2,
        5,
        WIDTH,
    ),
    "pools-1d-3d": after(
        lambda x: (
            F.max_pool1d(x.flatten(1, 2).flatten(2), 3),
            F.adaptive_max_pool3d(x, 2),
            F.avg_pool3d(x, 2),
            F.adaptive_avg_pool1d(x.flatten(1, 2).flatten(2), 4),
        ),
        3,
        2,
        3,
        4,
        WIDTH,
    ),
    "unpooled": after(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), 3, 2, 4, WIDTH),
    "batch-norm": layer(lambda: Normed(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), (7, 4)),
    "batch-norm-3d": layer(
        lambda: Normed(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4, momentum=0.3), nn.InstanceNorm3d(4, affine=True)),
        (3, 2, 3, 4, 3),
    ),
    "instance-norm": layer(
        lambda: Normed(nn.InstanceNorm2d(4, track_running_stats=True), nn.LocalResponseNorm(2), nn.GroupNorm(2, 4)),
        (3, 4, 5, 3),
    ),
    "rms-norm": layer(lambda: Normed(nn.RMSNorm((3, 6)), nn.LayerNorm((3, 6), bias=False)), (5, 3, 6)),
    "parametrized": parametrized,
    "orthogonal": orthogonal,
}

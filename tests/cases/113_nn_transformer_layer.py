"""Situation: nn.TransformerEncoderLayer / MultiheadAttention with key_padding_mask and attention
weights returned
Fault: packed in_proj weight split wrongly; fast path chosen
Right result: equal
"""

import torch
from torch import nn

KIND = "SDPA/flex"
SOURCE = "pytorch/pytorch#122460; microsoft/nnscaler#10"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.m = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=6)

    def forward(self, x, y, pad):
        h = self.e(x, src_key_padding_mask=pad)
        a, w = self.m(h, y, y)
        return a, w


def loss(out):
    return out[0].square().mean() + (out[1] * torch.arange(out[1].shape[-1])).mean()


def build():
    torch.manual_seed(0)
    pad = torch.zeros(2, 5, dtype=torch.bool)
    pad[0, 3:] = True
    return M().train(), (torch.randn(2, 5, 8), torch.randn(2, 4, 6), pad), {}

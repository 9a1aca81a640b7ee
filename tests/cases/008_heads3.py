"""Situation: attention with 3 heads (or 52) on a mesh that does not divide it
Fault: assert or a head cut in half by the reshape
Right result: equal (heads kept whole or replicated)
"""

import torch
from torch import nn

KIND = "uneven sharding"
SOURCE = "deepspeedai/DeepSpeed#3634; vllm-project/vllm#596"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class Attn(nn.Module):
    def __init__(self, d=12, h=3):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)

    def forward(self, x):
        B, S, D = x.shape
        q, k, v = (t.view(B, S, self.h, D // self.h).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = torch.softmax(q @ k.transpose(-1, -2) * (D // self.h) ** -0.5, -1)
        return self.o((a @ v).transpose(1, 2).reshape(B, S, D))


def build():
    torch.manual_seed(0)
    return Attn(), (torch.randn(2, 4, 12),), {}

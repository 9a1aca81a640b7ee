"""Situation: multi-query attention: a single kv head broadcast to all query heads
Fault: sharding the size-1 kv dim leaves ranks with nothing
Right result: equal
"""

import torch
from torch import nn

KIND = "GQA"
SOURCE = "pytorch/torchtitan#2577; vectorch-ai/ScaleLLM#137"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 4)
        self.v = nn.Linear(16, 4)

    def forward(self, x):
        B, S, _ = x.shape
        q = self.q(x).view(B, S, 4, 4).transpose(1, 2)
        k = self.k(x).unsqueeze(1)
        v = self.v(x).unsqueeze(1)
        return (torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v).transpose(1, 2).reshape(B, S, 16)


def build():
    torch.manual_seed(0)
    return Attn(), (torch.randn(2, 4, 16),), {}

"""Situation: rotary cache buffer at the root used by every layer, pipelined
Fault: buffer not copied to later stages / skip connection unsupported in backward
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "buffers"
SOURCE = "pytorch/pytorch#126653; pytorch/pytorch#184361; pytorch/pytorch#183024"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]

PIPELINE_STAGES = 2


def rot(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)
        self.v = nn.Linear(8, 8)

    def forward(self, x, cos, sin):
        y = F.scaled_dot_product_attention(
            rot(self.q(x), cos, sin), rot(self.k(x), cos, sin), self.v(x), is_causal=True
        )
        return x + y


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(L() for _ in range(4))
        f = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2)
        self.register_buffer("cos", f.cos(), persistent=False)
        self.register_buffer("sin", f.sin(), persistent=False)

    def forward(self, x):
        S = x.shape[1]
        for l in self.layers:
            x = l(x, self.cos[:S], self.sin[:S])
        return x


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 6, 8),), {}

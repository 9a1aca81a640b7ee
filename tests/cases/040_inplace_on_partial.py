"""Situation: in-place clamp on the result of a contraction over a sharded dim
Fault: clamp runs on the partial sums: 144 instead of 2
Right result: reduce first, then clamp
"""

import torch
from torch import nn

KIND = "in-place/views"
SOURCE = "pytorch/pytorch#163374; pytorch/pytorch#164729; pytorch/pytorch#173572"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 16, bias=False)
        self.b = nn.Linear(16, 4, bias=False)

    def forward(self, x):
        y = self.b(self.a(x))
        y.clamp_(max=0.2).mul_(3).add_(1)
        return y


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(6, 4),), {}

"""Situation: 48 blocks that are almost but not quite identical (every 3rd wider, every 5th without
bias)
Fault: blocks wrongly merged as repeated, plan applied to other shapes
Right result: equal
"""

import torch
from torch import nn

KIND = "very deep models"
SOURCE = "meta-pytorch/autoparallel#432; pytorch/torchtitan#4312"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

SOLVE_SECONDS = 60


class B(nn.Module):
    def __init__(self, d, f, bias):
        super().__init__()
        self.a = nn.Linear(d, f, bias=bias)
        self.b = nn.Linear(f, d)

    def forward(self, x):
        return x + 0.1 * self.b(torch.tanh(self.a(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[B(8, 12 if i % 3 else 20, bool(i % 5)) for i in range(48)]), (torch.randn(4, 8),), {}

"""Situation: 120 identical blocks
Fault: solver time grows with depth until unusable
Right result: equal, plan found within the time limit (repeated blocks recognised)
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "very deep models"
SOURCE = "hpcaitech/ColossalAI#2853; meta-pytorch/autoparallel#432; parasj/checkmate#58"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

SOLVE_SECONDS = 60


class B(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.a = nn.Linear(d, 2 * d)
        self.b = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + 0.1 * self.b(F.gelu(self.a(self.n(x))))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[B() for _ in range(120)]), (torch.randn(4, 3, 8),), {}

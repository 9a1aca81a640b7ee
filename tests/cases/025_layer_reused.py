"""Situation: the same layer object applied four times (ALBERT style), with per-call inputs
Fault: a cut between two applications duplicates the weight
Right result: one parameter, four gradient terms
"""

import torch
from torch import nn

KIND = "shared across stages"
SOURCE = "pytorch/pytorch#193338; pytorch/PiPPy#32"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]

PIPELINE_STAGES = 2


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.pos = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        for i in range(4):
            x = torch.tanh(self.l(x)) + self.pos[i]
        return x


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}

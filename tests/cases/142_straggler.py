"""Situation: one rank is 3x slower than the others but correct
Fault: taken for dead, or never reported
Right result: not treated as failure; equal losses; the slow rank can be named
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "straggler"
SOURCE = "intelligent-machine-learning/dlrover#688; NVIDIA-NeMo/RL#1992; flagos-ai/FlagScale#938"
EXPECT = "equal"
MESHES = [(4,)]


class M(nn.Module):
    def __init__(self, f=16):
        super().__init__()
        self.a = nn.Linear(8, f)
        self.b = nn.Linear(f, 8)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}


FAULT = {"kind": "slow", "rank": 3, "factor": 3.0}
STEPS = 4

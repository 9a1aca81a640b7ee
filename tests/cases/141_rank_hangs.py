"""Situation: one rank stops responding (no exit) or issues a collective the others do not
Fault: silent stall
Right result: timeout error that names the rank and the collective, then re-plan if asked
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "device failure"
SOURCE = "pytorch/pytorch#97191; pytorch/PiPPy#1064; dylanyunlon/Neuron_SP#51"
EXPECT = "error:rank"
MESHES = [(2,), (4,)]


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


FAULT = {"kind": "hang", "rank": 1, "step": 1, "seconds": 3600}
STEPS = 3

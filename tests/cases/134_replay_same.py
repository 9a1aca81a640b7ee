"""Situation: save the plan as JSON, load it in a new process, run
Fault: placements matched by position: another node gets them
Right result: equal, and the re-saved JSON is identical
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "plan replay"
SOURCE = "meta-pytorch/autoparallel#460; alpa-projects/alpa#587"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]


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


REPLAY = True

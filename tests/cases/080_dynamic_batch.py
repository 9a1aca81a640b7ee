"""Situation: batch size changes between steps (4, then 6, then 3)
Fault: plan specialised on the first batch size, or view with a symbolic size fails
Right result: equal for every size allowed by the dynamic range
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "dynamic dims"
SOURCE = "meta-pytorch/autoparallel#418; pytorch/pytorch#159942"
EXPECT = "equal"
MESHES = [(2,), (4,)]

DYNAMIC = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
RUNTIME_SHAPES = [(4, 5, 6), (6, 5, 6), (3, 5, 6)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 12)
        self.b = nn.Linear(12, 6)

    def forward(self, x):
        B, S, D = x.shape
        return self.b(F.gelu(self.a(x.view(B * S, D)))).view(B, S, D).mean(1)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 5, 6),), {}

"""Situation: forward opens autocast(bf16) for part of the model and disables it for the softmax
part
Fault: autocast region traced as a sub-graph, or dropped: other dtypes than eager
Right result: equal within tolerance
"""

import torch
from torch import nn

KIND = "autocast"
SOURCE = "pytorch/pytorch#137495; pytorch/pytorch#137287; pytorch/pytorch#131914; pytorch/pytorch#148831"
EXPECT = "equal"
MESHES = [(2,), (4,)]

TOL = 3e-2


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.relu(self.a(x))
            y = self.b(h)
            with torch.autocast("cpu", enabled=False):
                p = y.float().softmax(-1)
        return p * y


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 8),), {}

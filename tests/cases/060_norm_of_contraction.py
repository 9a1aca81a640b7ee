"""Situation: vector norms (p=1,2,3,inf) of a row-parallel output
Fault: norm of partial values summed
Right result: equal
"""

import torch
from torch import nn

KIND = "reductions/Partial"
SOURCE = "pytorch/pytorch#159856; pytorch/pytorch#172604; pytorch/pytorch#152249"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 12, bias=False)
        self.b = nn.Linear(12, 6, bias=False)

    def forward(self, x):
        y = self.b(self.a(x))
        return sum(torch.linalg.vector_norm(y, p, dim=-1) for p in (1, 2, 3, float("inf"))) + torch.norm(y, dim=0).sum()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(5, 6),), {}

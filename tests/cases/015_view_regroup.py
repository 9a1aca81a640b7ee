"""Situation: view that merges and re-splits dims: (12,8) -> (16,6)
Fault: sharded view accepted without moving data: permuted values, no error
Right result: equal
"""

import torch
from torch import nn

KIND = "views"
SOURCE = "pytorch/pytorch#179502; pytorch/pytorch#179632"
EXPECT = "equal"
MESHES = [(2,), (4,), (6,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.t = nn.Linear(6, 2)

    def forward(self, x):
        return self.t(self.l(x).view(-1, 6))


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(12, 8),), {}

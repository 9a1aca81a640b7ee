"""Situation: mean over a tensor whose sharded dim (3) does not divide the mesh (2)
Fault: average of per-rank averages is returned (and NaN when a rank is empty)
Right result: true global mean and its gradient
"""

import torch
from torch import nn

KIND = "uneven sharding"
SOURCE = "pytorch/pytorch#162692"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0).reshape(3, 4))

    def forward(self, x):
        return (self.w * x).mean() + self.w[:1].mean()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(3, 4),), {}

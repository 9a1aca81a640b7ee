"""Situation: split of a sharded feature dim into (heads=6, dim) on 4 ranks
Fault: local split impossible; silent redistribution inside a view or error
Right result: equal
"""

import torch
from torch import nn

KIND = "views"
SOURCE = "pytorch/pytorch#161950; pytorch/pytorch#149764"
EXPECT = "equal"
MESHES = [(4,), (2,), (3,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 24)
        self.g = nn.Parameter(torch.randn(6, 1))

    def forward(self, x):
        return (self.l(x).unflatten(-1, (6, 4)) * self.g).amax(-1)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(3, 8),), {}

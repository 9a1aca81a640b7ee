"""Situation: amax/amin/prod over a dim of 3 with 4+ ranks, all values negative
Fault: identity of the empty shard (0) wins or op raises on empty input
Right result: equal
"""

import torch
from torch import nn

KIND = "reductions/Partial"
SOURCE = "pytorch/pytorch#162692; pytorch/pytorch#173936"
EXPECT = "equal"
MESHES = [(4,), (8,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        h = -self.l(x).square() - 1
        return h.amax(0) + h.amin(1).sum() + (h * 0.3).prod(0)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(3, 4),), {}

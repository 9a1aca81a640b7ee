"""Situation: variance/std over a dim of 7 (unbiased and biased) that may be sharded
Fault: mean of shard variances
Right result: equal
"""

import torch
from torch import nn

KIND = "reductions/Partial"
SOURCE = "pytorch/pytorch#162692"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        h = self.l(x)
        return h.var(0) + h.std(0, correction=0) + h.mean(0) * h.std(1).sum()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(7, 4),), {}

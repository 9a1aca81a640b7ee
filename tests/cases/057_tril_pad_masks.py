"""Situation: mask built with arange/tril inside forward, constant_pad, where
Fault: mask rows built with local sizes
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "gather/scatter/sort"
SOURCE = "pytorch/pytorch#177583"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)

    def forward(self, x):
        S = x.shape[1]
        s = self.q(x) @ self.k(x).transpose(1, 2)
        keep = torch.ones(S, S, dtype=torch.bool).tril() & (torch.arange(S)[:, None] - torch.arange(S)[None] < 3)
        p = torch.where(keep, s, torch.full_like(s, float("-inf"))).softmax(-1)
        return F.pad(p @ x, (1, 0, 2, 1), value=0.5)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(2, 6, 4),), {}

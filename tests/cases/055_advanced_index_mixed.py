"""Situation: advanced indexing with non-adjacent index tensors and a None dim
Fault: output dim mapping of the rule is wrong
Right result: equal
"""

import torch
from torch import nn

KIND = "gather/scatter/sort"
SOURCE = "meta-pytorch/autoparallel#370"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 6, 8, 3))

    def forward(self, i, j):
        return self.p[i, :, j] * self.p[:, i, :, None].mean((0, 2, 3))[:, None]


def build():
    torch.manual_seed(0)
    return M(), (torch.tensor([0, 3, 1]), torch.tensor([7, 2, 2])), {}

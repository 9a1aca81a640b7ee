"""Situation: tokens permuted by sort, processed, scattered back with scatter_add
Fault: only the replicated strategy exists, or token order lost
Right result: equal
"""

import torch
from torch import nn

KIND = "gather/scatter/sort"
SOURCE = "pytorch/pytorch#186149; meta-pytorch/autoparallel#169; pytorch/torchtitan#1971"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x, key):
        order = torch.argsort(key, stable=True)
        y = self.l(x[order]) * torch.linspace(1, 2, x.shape[0])[:, None]
        return torch.zeros_like(x).scatter_add(0, order[:, None].expand_as(y), y)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 4), torch.tensor([3, 1, 2, 1, 0, 3, 2, 0])), {}

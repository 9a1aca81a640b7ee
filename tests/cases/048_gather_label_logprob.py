"""Situation: log-probability of labels by gather on the (possibly sharded) vocabulary dim
Fault: global index used on a local shard
Right result: equal
"""

import torch
from torch import nn

KIND = "gather/scatter/sort"
SOURCE = "alpa-projects/alpa#958; alpa-projects/alpa#787"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Linear(6, 15)

    def forward(self, x, y):
        return -torch.log_softmax(self.h(x), -1).gather(-1, y[..., None]).mean()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 3, 6), torch.randint(0, 15, (4, 3))), {}

"""Situation: parameter of leading size 6 on 4 ranks: chunk sizes 2,2,2,0
Fault: rank with the empty shard breaks checkpoint save/load or offset maths
Right result: equal, and saving/loading the sharded state round-trips
"""

import torch
from torch import nn

KIND = "uneven sharding"
SOURCE = "pytorch/pytorch#108869; pytorch/pytorch#150862; pytorch/pytorch#163480"
EXPECT = "equal"
MESHES = [(4,), (2, 2), (8,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.one = nn.Parameter(torch.randn(1, 17))

    def forward(self, x):
        return (self.a(x) * self.scale).sum(-1, keepdim=True) * self.one


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}

"""Situation: parameter of shape (1,17) replicated on tp and sharded on dp
Fault: loading a full state dict yields shape (2,17)
Right result: equal, full state dict keeps (1,17)
"""

import torch
from torch import nn

KIND = "uneven sharding"
SOURCE = "pytorch/pytorch#136228"
EXPECT = "equal"
MESHES = [(2, 2), (2, 4)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(17, 1, bias=False)
        self.up = nn.Linear(1, 16)

    def forward(self, x):
        return self.up(self.l(x))


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 17),), {}

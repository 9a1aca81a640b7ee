"""Situation: shift-by-one slices of the sequence concatenated back, plus a strided slice
Fault: slice offsets applied per shard
Right result: equal
"""

import torch
from torch import nn

KIND = "views"
SOURCE = "tinygrad/tinygrad#13853; openxla/xla#49122"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        y = self.l(x)
        shifted = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return (y - 0.5 * shifted)[:, 1::2].narrow(-1, 1, 2)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 9, 4),), {}

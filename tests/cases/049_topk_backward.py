"""Situation: gradient through topk values
Fault: backward scatters sharded gradients into a plain zeros tensor: mixed-type crash
Right result: equal
"""

import torch
from torch import nn

KIND = "gather/scatter/sort"
SOURCE = "pytorch/torchtitan#2801; pytorch/pytorch#178582"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 10)

    def forward(self, x):
        v, i = torch.topk(self.l(x), 3, dim=-1)
        return (v * (i + 1)).sum(-1)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 4),), {}

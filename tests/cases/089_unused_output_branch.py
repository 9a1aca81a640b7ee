"""Situation: one of two differentiable outputs is not used by the loss; an op with several outputs
is half used
Fault: gradient of the unused output is a plain zeros tensor: type mismatch
Right result: equal
"""

import torch
from torch import nn

KIND = "None outputs"
SOURCE = "pytorch/pytorch#173123; pytorch/pytorch#172556; pytorch/torchtitan#2748"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 8)
        self.aux = nn.Linear(8, 3)

    def forward(self, x):
        a, b = self.l(x).chunk(2, -1)
        v, i = torch.sort(a, -1)
        return v, self.aux(torch.cat([a, b], -1)), i


def loss(out):
    return out[0].square().mean()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 4),), {}

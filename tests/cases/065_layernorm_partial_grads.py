"""Situation: LayerNorm with frozen weight / no bias, RMSNorm with frozen weight on a 2D mesh
Fault: strategy emits None on one axis and a sum on the other, raises
Right result: equal, frozen ones get no gradient
"""

import torch
from torch import nn

KIND = "norm layers"
SOURCE = "pytorch/pytorch#133502; pytorch/pytorch#187373; pytorch/pytorch#128699"
EXPECT = "equal"
MESHES = [(2,), (2, 2), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1 = nn.LayerNorm(8)
        self.n2 = nn.LayerNorm(8, bias=False)
        self.n3 = nn.RMSNorm(8)
        self.l = nn.Linear(8, 8)
        self.n1.weight.requires_grad_(False)
        self.n3.weight.requires_grad_(False)

    def forward(self, x):
        return self.n3(self.l(self.n2(self.l(self.n1(x)))))


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 6, 8),), {}

"""Situation: router and norms kept in fp32, the rest in bf16, an int64 buffer and an fp64
parameter
Fault: one dtype assumed for all parameters
Right result: equal within tolerance, dtypes preserved
"""

import torch
from torch import nn

KIND = "mixed precision"
SOURCE = "facebookresearch/fairscale#449; pytorch/pytorch#105348; pytorch/pytorch#196996"
EXPECT = "equal"
MESHES = [(2,), (4,)]

TOL = 3e-2


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8).bfloat16()
        self.n = nn.LayerNorm(8)
        self.r = nn.Linear(8, 2)
        self.d = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("step", torch.tensor(3))

    def forward(self, x):
        h = self.l(self.n(x).bfloat16()).float()
        return (self.r(h) * self.d).float() / self.step


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 8),), {}

"""Situation: selective scan written as a Python loop over time, reading slices and stacking
Fault: graph explodes and every slice/stack must keep the same sharding
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "LSTM/scan"
SOURCE = "pytorch/pytorch#130150; pytorch/pytorch#133221"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self, d=6, n=4):
        super().__init__()
        self.A = nn.Parameter(torch.rand(d, n))
        self.bc = nn.Linear(d, 2 * n)
        self.dt = nn.Linear(d, d)
        self.D = nn.Parameter(torch.ones(d))

    def forward(self, x):
        B, L, d = x.shape
        b, c = self.bc(x).chunk(2, -1)
        dt = F.softplus(self.dt(x))
        h = x.new_zeros(B, d, self.A.shape[1])
        ys = []
        for t in range(L):
            h = torch.exp(-dt[:, t, :, None] * self.A) * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
        return torch.stack(ys, 1) + x * self.D


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8, 6),), {}

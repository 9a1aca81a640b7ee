"""Situation: python int/float/bool arguments, 0-dim tensor input and 0-dim parameter
Fault: 0-dim tensor given a sharded placement; scalar specialised silently
Right result: equal
"""

import torch
from torch import nn

KIND = "zero-size/scalar"
SOURCE = "pytorch/pytorch#169361; alpa-projects/alpa#324; pytorch/pytorch#98231"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.temp = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, t, k: int, s: float, flag: bool):
        y = self.l(x) / self.temp + t * s
        return y[:, :k] if flag else y


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 4), torch.tensor(2.0), 3, 0.5, True), {}

"""Situation: slice assignment, write through a transposed view, in-place ReLU on a residual
Fault: alias lost after sharding: one branch sees the old value
Right result: equal (functionalised)
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "in-place/views"
SOURCE = "pytorch/pytorch#108079; pytorch/pytorch#118461"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x):
        h = self.l(x).clone()
        v = h.t()
        v[2] += 1.0
        h[:, 0] = h[:, 1] * 2
        r = h[1:]
        F.relu_(r)
        return h + x


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 6),), {}

"""Situation: labels and a mask passed as keyword arguments, used only by the last pipeline stage
Fault: inputs only reach stage 0
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "structured outputs"
SOURCE = "pytorch/pytorch#130055; pytorch/pytorch#136416; pytorch/pytorch#128115"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

PIPELINE_STAGES = 2


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.o = nn.Linear(6, 5)

    def forward(self, x, *, labels, weight=None, scale: float = 1.0):
        for l in self.ls:
            x = x + torch.tanh(l(x))
        e = F.cross_entropy(self.o(x) * scale, labels, reduction="none")
        return (e * weight).sum() / weight.sum()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 6),), {"labels": torch.randint(0, 5, (8,)), "weight": torch.rand(8), "scale": 0.5}

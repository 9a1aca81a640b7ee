"""Situation: teacher branch under no_grad and stop-gradient tricks (straight-through, x +
(y-x).detach())
Fault: no_grad region lost in tracing: teacher gets gradients
Right result: teacher gradients None, student equal
"""

import torch
from torch import nn

KIND = "unused params"
SOURCE = "facebookresearch/fairscale#605; lightseekorg/TorchSpec#32"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Linear(4, 4)
        self.t = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            y = self.t(x).round()
        s = self.s(x)
        return s + (s.sign() - s).detach() * 0.5 + (s - y).square()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(6, 4),), {}

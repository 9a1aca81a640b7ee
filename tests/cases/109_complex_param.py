"""Situation: complex64 parameter (spectral filter)
Fault: collectives turn it into a real view
Right result: complex gradient equal
"""

import torch
from torch import nn

KIND = "complex"
SOURCE = "pytorch/pytorch#55375"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4, dtype=torch.cfloat))
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        f = torch.fft.rfft(self.l(x), dim=1, norm="ortho")
        return torch.fft.irfft(f * self.w, n=x.shape[1], dim=1, norm="ortho")


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8, 4),), {}

"""Situation: FNet style mixing with a 2-D FFT over sequence and feature
Fault: no sharding rule registered for the FFT op
Right result: equal (shard batch only)
"""

import torch
from torch import nn

KIND = "gather/scatter/sort"
SOURCE = "pytorch/pytorch#188182; pytorch/pytorch#188369"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        return self.l(torch.fft.fft2(x, dim=(-2, -1)).real) + torch.fft.irfft(
            torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1
        )


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 6, 8),), {}

"""Situation: U-Net: pooling, bilinear/nearest upsample, concatenated skips
Fault: upsample backward gets the global input size; skip across stages unsupported
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "conv/pooling"
SOURCE = "pytorch/pytorch#182595; pytorch/pytorch#127964"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]

PIPELINE_STAGES = 2


class M(nn.Module):
    def __init__(self):
        super().__init__()
        c = lambda i, o: nn.Conv2d(i, o, 3, padding=1)
        self.d1, self.d2, self.mid, self.u2, self.u1 = c(2, 4), c(4, 8), c(8, 8), c(16, 4), c(8, 2)

    def forward(self, x):
        a = F.relu(self.d1(x))
        b = F.relu(self.d2(F.avg_pool2d(a, 2)))
        m = F.relu(self.mid(F.max_pool2d(b, 2)))
        y = F.relu(self.u2(torch.cat([F.interpolate(m, scale_factor=2, mode="bilinear", align_corners=False), b], 1)))
        return self.u1(torch.cat([F.interpolate(y, size=a.shape[-2:], mode="nearest"), a], 1))


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 2, 8, 8),), {}

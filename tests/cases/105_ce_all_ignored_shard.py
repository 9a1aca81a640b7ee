"""Situation: one data shard contains only ignored labels
Fault: 0/0 on that rank: NaN everywhere
Right result: finite, equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "cross entropy"
SOURCE = "pytorch/pytorch#180936; vllm-project/vllm#440"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 9)

    def forward(self, x, y):
        return F.cross_entropy(self.l(x).flatten(0, 1), y.flatten())


def build():
    torch.manual_seed(0)
    y = torch.randint(0, 9, (4, 5))
    y[2:] = -100
    return M(), (torch.randn(4, 5, 6), y), {}

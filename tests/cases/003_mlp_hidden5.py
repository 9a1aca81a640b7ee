"""Situation: column- then row-parallel linear with 5 hidden units on 2 ranks
Fault: second linear sees a local size that is rounded up (6 or 4 instead of 5)
Right result: equal output and gradients
"""

import torch
from torch import nn

KIND = "uneven sharding"
SOURCE = "pytorch/pytorch#150336"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


def build():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))
    return m, (torch.randn(4, 4),), {}

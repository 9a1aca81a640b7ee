"""Situation: 2-D/3-D mesh with an axis of size 1
Fault: 1-D strategies emitted for a 2-D mesh
Right result: equal
"""

import torch
from torch import nn

KIND = "degenerate meshes"
SOURCE = "pytorch/pytorch#139134; pytorch/pytorch#138742; tenstorrent/tt-xla#3285"
EXPECT = "equal"
MESHES = [(1, 2), (2, 1), (1, 1), (1, 4), (2, 1, 2)]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)), (torch.randn(4, 3, 6),), {}

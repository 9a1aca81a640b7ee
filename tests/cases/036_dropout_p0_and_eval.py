"""Situation: dropout present but p=0 or module in eval
Fault: planner refuses or consumes RNG for nothing
Right result: equal
"""

import torch
from torch import nn

KIND = "dropout/RNG"
SOURCE = "pytorch/pytorch#168058"
EXPECT = "equal"
MESHES = [(2,), (4,)]


def build():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    m[3].eval()
    return m, (torch.randn(8, 8),), {}

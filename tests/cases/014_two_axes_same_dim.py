"""Situation: weight rows (5 or 6) sharded by two mesh axes at once (FSDP over TP)
Fault: rows come back permuted or with gaps after gathering
Right result: full parameter and its gradient in the original row order
"""

import torch
from torch import nn

KIND = "uneven sharding"
SOURCE = "pytorch/pytorch#163843; pytorch/pytorch#168134; pytorch/pytorch#129206; pytorch/pytorch#118836"
EXPECT = "equal"
MESHES = [(2, 2), (2, 3), (3, 2)]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)), (torch.randn(4, 4),), {}

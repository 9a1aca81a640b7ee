"""Situation: per-device memory budget smaller than the sharded parameters
Fault: solver says only 'infeasible', or returns a plan that runs out of memory
Right result: error that names memory, the budget and the smallest need
"""

import torch
from torch import nn

KIND = "infeasible memory"
SOURCE = "meta-pytorch/autoparallel#475; pytorch/torchtitan#1349"
EXPECT = "error:memory"
MESHES = [(2,), (2, 2)]

MEMORY_BUDGET_BYTES = 4096


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), (torch.randn(4, 32),), {}

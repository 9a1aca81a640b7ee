"""Situation: budget that admits only fully sharded parameters, while one parameter is pinned
replicated by the user
Fault: user constraint plus budget makes the problem infeasible
Right result: equal, plan respects the budget
"""

import torch
from torch import nn

KIND = "infeasible memory"
SOURCE = "meta-pytorch/autoparallel#475; meta-pytorch/autoparallel#332"
EXPECT = "equal"
MESHES = [(2,), (4,)]

MEMORY_BUDGET_BYTES = 400_000


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), (torch.randn(8, 64),), {}

"""Situation: two backward passes before the optimizer step
Fault: second backward overwrites, or sharded gradients are reduced twice
Right result: sum of both gradients
"""

import torch
from torch import nn

KIND = "gradient accumulation"
SOURCE = "pytorch/pytorch#196996; pytorch/torchtitan#1593"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

STEPS = 2


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), (torch.randn(4, 4),), {}

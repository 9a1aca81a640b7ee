"""Situation: model fully frozen, gradient wanted for the input (prompt tuning / adversarial)
Fault: input gradient not produced, or sharded like the batch and not returned whole
Right result: input gradient equal
"""

import torch
from torch import nn

KIND = "frozen params"
SOURCE = "pytorch/pytorch#186542; microsoft/LoRA#185"
EXPECT = "equal"
MESHES = [(2,), (4,)]

CHECK_INPUT_GRADS = True


def build():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    m.requires_grad_(False)
    return m, (torch.randn(4, 4, requires_grad=True),), {}

"""Situation: checkpointed block under autocast, same weight used in two checkpointed regions
Fault: recompute sees another dtype (cast cache): metadata mismatch
Right result: equal within tolerance
"""

import torch
from torch import nn

KIND = "autocast"
SOURCE = "pytorch/pytorch#141896; pytorch/pytorch#193338; pytorch/pytorch#159359"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

TOL = 3e-2
from torch.utils.checkpoint import checkpoint


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                x = checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=False)
        return x.float()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 8),), {}

"""Situation: forward renormalises a parameter under no_grad (weight norm constraint, Embedding
max_norm)
Fault: internal assertion deep in signature code
Right result: clear refusal naming the parameter, or equal
"""

import torch
from torch import nn

KIND = "in-place/views"
SOURCE = "pytorch/pytorch#186470"
EXPECT = "error:mutat"
MESHES = [(2,)]

ALSO_OK = "equal"


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4) * 2)

    def forward(self, x):
        with torch.no_grad():
            self.w.div_(self.w.norm(dim=1, keepdim=True).clamp(min=1.0))
        return x @ self.w.t()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(6, 4),), {}

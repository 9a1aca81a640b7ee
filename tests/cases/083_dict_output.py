"""Situation: model returns a nested dict with tuples
Fault: output structure flattened or keys reordered
Right result: same structure and values
"""

import torch
from torch import nn

KIND = "structured outputs"
SOURCE = "pytorch/pytorch#138839; pytorch/pytorch#127964"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 6)

    def forward(self, x):
        h = self.l(x)
        return {"z": h, "a": {"pair": (h.sum(-1), h[:, :2]), "list": [h.mean()]}}


def loss(out):
    return out["z"].square().mean() + out["a"]["pair"][0].mean() + out["a"]["list"][0]


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 4),), {}

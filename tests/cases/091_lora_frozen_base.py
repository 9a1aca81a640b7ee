"""Situation: LoRA: base weights frozen, low-rank adapters (rank 2 < mesh) trained
Fault: frozen weights come back trainable, or rank dim sharded below 1
Right result: requires_grad preserved, only adapters get gradients
"""

import torch
from torch import nn

KIND = "frozen params"
SOURCE = "pytorch/torchtitan#4267; pytorch/torchtitan#3886; pytorch/PiPPy#1122; meta-pytorch/autoparallel#175"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class Lora(nn.Module):
    def __init__(self, i, o, r=2):
        super().__init__()
        self.base = nn.Linear(i, o)
        self.a = nn.Parameter(torch.randn(r, i) * 0.1)
        self.b = nn.Parameter(torch.randn(o, r) * 0.1)
        for p in self.base.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + (x @ self.a.t()) @ self.b.t() * 2


def build():
    torch.manual_seed(0)
    return nn.Sequential(Lora(6, 8), nn.ReLU(), Lora(8, 8), nn.ReLU(), Lora(8, 3)), (torch.randn(4, 6),), {}

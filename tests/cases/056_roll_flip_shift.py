"""Situation: shifted-window attention: roll over two dims, flip, window partition
Fault: roll applied inside each shard
Right result: equal
"""

import torch
from torch import nn

KIND = "gather/scatter/sort"
SOURCE = "pytorch/pytorch#175463"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.roll(x, (-1, -2), (1, 2))
        B, H, W, C = x.shape
        w = x.view(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, C)
        w = (
            self.l(w - w.mean(1, keepdim=True))
            .view(B, H // 2, W // 2, 2, 2, C)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(B, H, W, C)
        )
        return torch.roll(w, (1, 2), (1, 2)).flip(1)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(2, 4, 4, 4),), {}

"""Situation: one linear makes 6 modulation vectors that are then chunked along the sharded feature
dim
Fault: each rank slices its own block, so shift/scale/gate get mixed
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "views"
SOURCE = "tenstorrent/tt-mlir#9167"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class Block(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.mod = nn.Linear(d, 6 * d)
        self.n = nn.LayerNorm(d, elementwise_affine=False)
        self.a = nn.Linear(d, d)
        self.m = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, c):
        s1, c1, g1, s2, c2, g2 = self.mod(F.silu(c)).unsqueeze(1).chunk(6, -1)
        x = x + g1 * self.a(self.n(x) * (1 + c1) + s1)
        return x + g2 * self.m(self.n(x) * (1 + c2) + s2)


def build():
    torch.manual_seed(0)
    return Block(), (torch.randn(2, 4, 8), torch.randn(2, 8)), {}

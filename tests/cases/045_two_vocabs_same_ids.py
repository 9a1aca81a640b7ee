"""Situation: two row-sharded embeddings (100 and 101 rows) looked up with the same ids before any
reduction
Fault: masks of the two look-ups are confused in backward
Right result: equal
"""

import torch
from torch import nn

KIND = "embedding padding_idx"
SOURCE = "pytorch/pytorch#130725"
EXPECT = "equal"
MESHES = [(2,), (4,), (8,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(100, 6)
        self.b = nn.Embedding(101, 5)
        self.l = nn.Linear(6, 5)

    def forward(self, ids):
        return self.l(self.a(ids)) + self.b(ids)


def build():
    torch.manual_seed(0)
    return M(), (torch.tensor([1, 2, 3, 50, 99, 26]),), {}

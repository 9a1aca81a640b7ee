"""Situation: head uses a transposed slice of the embedding (only the first rows), with a scale
Fault: view of a tied weight sharded inconsistently
Right result: equal
"""

import torch
from torch import nn

KIND = "tied weights"
SOURCE = "facebookresearch/fairseq2#1380; pytorch/pytorch#80951"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(13, 8)

    def forward(self, ids):
        h = self.emb(ids).mean(1)
        return h @ (self.emb.weight[:10].t() * 8**-0.5)


def build():
    torch.manual_seed(0)
    return M(), (torch.randint(0, 13, (4, 3)),), {}

"""Situation: EmbeddingBag(mean) with offsets and an empty bag
Fault: no rule for the op / wrong rule for its gather
Right result: equal
"""

import torch
from torch import nn

KIND = "embedding padding_idx"
SOURCE = "alpa-projects/alpa#787; meta-pytorch/autoparallel#22"
EXPECT = "equal"
MESHES = [(2,), (3,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.EmbeddingBag(10, 4, mode="mean")
        self.l = nn.Linear(4, 2)

    def forward(self, ids, off):
        return self.l(self.e(ids, off))


def build():
    torch.manual_seed(0)
    return M(), (torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 3, 6])), {}

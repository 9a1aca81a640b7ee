"""Situation: model returns (loss, logits) with labels given; user backpropagates only the loss
Fault: joint graph expects tangents for the logits, or a scalar loss sharded
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "cross entropy"
SOURCE = "pytorch/pytorch#184361; pytorch/torchtitan#3780; pytorch/pytorch#94965"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 6)
        self.h = nn.Linear(6, 11)

    def forward(self, ids, labels=None):
        z = self.h(torch.tanh(self.e(ids)))
        l = None if labels is None else F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return l, z


def loss(out):
    return out[0]


def build():
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (4, 6))
    return M(), (ids,), {"labels": ids.clone()}

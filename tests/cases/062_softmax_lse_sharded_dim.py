"""Situation: softmax and logsumexp whose reduced dim is sharded, large negative and positive
logits
Fault: per-shard maxima are added instead of maxed: inf/NaN
Right result: finite and equal
"""

import torch
from torch import nn

KIND = "reductions/Partial"
SOURCE = "tenstorrent/tt-xla#6075; pytorch/pytorch#163879; pytorch/PiPPy#440"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 9)
        nn.init.normal_(self.l.bias, std=60.0)

    def forward(self, x):
        z = self.l(x)
        return z.softmax(-1) @ self.l.weight + z.logsumexp(-1, keepdim=True) * 0.01 + z.logsumexp(0).sum() * 1e-3


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(6, 4),), {}

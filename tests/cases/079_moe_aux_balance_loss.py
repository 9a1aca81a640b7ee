"""Situation: load-balancing loss = experts * sum(fraction_i * mean_prob_i) over all tokens
Fault: computed per shard then averaged: product of means is not mean of products
Right result: global value
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "MoE"
SOURCE = "NVIDIA/Megatron-LM#1444; pytorch/torchtitan#1593"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.Linear(6, 4)
        self.l = nn.Linear(6, 6)

    def forward(self, x):
        p = self.r(x).softmax(-1)
        f = F.one_hot(p.argmax(-1), 4).to(x.dtype).mean((0, 1))
        aux = 4 * (f * p.mean((0, 1))).sum() + 1e-2 * self.r(x).logsumexp(-1).square().mean()
        return (self.l(x) * p.amax(-1, keepdim=True)).square().mean() + aux


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 6, 6),), {}

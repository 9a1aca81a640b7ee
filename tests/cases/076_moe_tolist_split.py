"""Situation: DeepSeek style: sort by expert, bincount().tolist(), slice per expert, skip empty
experts
Fault: python control flow on tensor values cannot be traced
Right result: equal, or refusal naming the data-dependent control flow
"""

import torch
from torch import nn

KIND = "MoE"
SOURCE = "pytorch/pytorch#154559; meta-pytorch/autoparallel#29"
EXPECT = "equal"
MESHES = [(2,), (4,)]

ALSO_OK = "error:data-dependent"


class M(nn.Module):
    def __init__(self, d=6, E=4):
        super().__init__()
        self.E = E
        self.r = nn.Linear(d, E)
        self.e = nn.ModuleList(nn.Linear(d, d) for _ in range(E))

    def forward(self, x):
        p = self.r(x).softmax(-1)
        v, k = p.max(-1)
        order = k.argsort(stable=True)
        xs = x[order]
        outs = []
        s = 0
        for n, c in enumerate(torch.bincount(k, minlength=self.E).tolist()):
            if c == 0:
                continue
            outs.append(self.e[n](xs[s : s + c]))
            s += c
        y = torch.cat(outs)
        return torch.zeros_like(x).index_copy(0, order, y) * v[:, None]


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 6),), {}

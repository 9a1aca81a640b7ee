"""Situation: per-expert token selection with torch.where/nonzero inside a loop over experts
(Mixtral style)
Fault: unbacked sizes: tracing guard error, or planner has no static shape
Right result: equal, or refusal naming the data-dependent shape
"""

import torch
from torch import nn

KIND = "MoE"
SOURCE = "pytorch/pytorch#154559; pytorch/pytorch#140421; pytorch/pytorch#96679"
EXPECT = "equal"
MESHES = [(2,), (4,)]

ALSO_OK = "error:data-dependent"


class M(nn.Module):
    def __init__(self, d=6, E=3):
        super().__init__()
        self.r = nn.Linear(d, E)
        self.e = nn.ModuleList(nn.Linear(d, d) for _ in range(E))

    def forward(self, x):
        p = self.r(x).softmax(-1)
        v, k = p.max(-1)
        out = torch.zeros_like(x)
        for n, ex in enumerate(self.e):
            idx = torch.where(k == n)[0]
            out = out.index_add(0, idx, ex(x[idx]) * v[idx, None])
        return out


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(9, 6),), {}

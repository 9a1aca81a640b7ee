"""Situation: fixed capacity routing: position in expert from a cumulative sum over tokens,
overflow dropped
Fault: cumsum per shard: other tokens get dropped than on one device
Right result: equal: same tokens dropped
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "MoE"
SOURCE = "pytorch/torchtitan#1324; meta-pytorch/autoparallel#428"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self, d=6, E=3, cap=3):
        super().__init__()
        self.E, self.cap = E, cap
        self.r = nn.Linear(d, E)
        self.w = nn.Parameter(torch.randn(E, d, d) * 0.3)

    def forward(self, x):
        p = self.r(x).softmax(-1)
        v, k = p.max(-1)
        hot = F.one_hot(k, self.E)
        pos = (hot.cumsum(0) - 1).gather(1, k[:, None])[:, 0]
        keep = pos < self.cap
        slot = F.one_hot(pos.clamp(max=self.cap - 1), self.cap) * keep[:, None]
        disp = torch.einsum("te,tc->tec", hot.to(x.dtype), slot.to(x.dtype))
        y = torch.einsum("ecd,edf->ecf", torch.einsum("tec,td->ecd", disp, x), self.w)
        return torch.einsum("tec,ecf->tf", disp, y) * v[:, None]


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(12, 6),), {}

"""Situation: router keeps a tokens-per-expert counter buffer, updated in place from this batch
Fault: each rank counts only its shard, or recompute counts twice
Right result: buffer holds the global count once
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "buffers"
SOURCE = "pytorch/torchtitan#1114; pytorch/torchtitan#1593; pytorch/torchtitan#3386; pytorch/pytorch#188763"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]

COMPARE_BUFFERS = True


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(6, 4, bias=False)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("bias", torch.tensor([0.0, 0.1, -0.1, 0.05]))

    def forward(self, x):
        s = torch.sigmoid(self.g(x))
        top = (s + self.bias).topk(2, -1).indices
        hot = F.one_hot(top, 4).sum(1).to(s.dtype)
        with torch.no_grad():
            self.count.add_(hot.sum(0))
        return (s * hot).sum(-1)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(8, 6),), {}

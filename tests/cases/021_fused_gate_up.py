"""Situation: fused gate/up projection (and unequal fused q/kv) split after a column-parallel
matmul
Fault: half of gate is paired with half of up; resharded checkpoint reads chunks in the wrong
order
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "views"
SOURCE = "ROCm/Megatron-LM#63; NVIDIA/TransformerEngine#394"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.gu = nn.Linear(8, 32, bias=False)
        self.d = nn.Linear(16, 8, bias=False)
        self.qkv = nn.Linear(8, 8 + 4 + 4)

    def forward(self, x):
        g, u = self.gu(x).chunk(2, -1)
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        return self.d(F.silu(g) * u) + q * torch.cat([k, v], -1).tanh()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 3, 8),), {}

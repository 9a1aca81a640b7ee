"""Situation: causal self-attention and non-causal cross-attention with different lengths (6 vs 5)
Fault: causal offset lost when the sequence is sharded
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "SDPA/flex"
SOURCE = "pytorch/pytorch#177583; pytorch/pytorch#141429; zhuzilin/ring-flash-attention#15"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Linear(8, 24)
        self.q = nn.Linear(8, 8)
        self.kv = nn.Linear(8, 16)

    def forward(self, x, m):
        h = lambda t: t.unflatten(-1, (2, 4)).transpose(1, 2)
        q, k, v = map(h, self.s(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        k2, v2 = map(h, self.kv(m).chunk(2, -1))
        return y + F.scaled_dot_product_attention(h(self.q(y)), k2, v2, scale=0.3).transpose(1, 2).flatten(2)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(2, 6, 8), torch.randn(2, 5, 8)), {}

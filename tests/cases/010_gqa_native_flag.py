"""Situation: SDPA called with enable_gqa=True and a per-head mask, 6 query heads over 3 kv heads
Fault: rule that ties q/k/v head sharding one-to-one mixes groups
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "GQA"
SOURCE = "pytorch/pytorch#178207; keras-team/keras#23081"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(24, 24)
        self.kv = nn.Linear(24, 24)

    def forward(self, x, mask):
        B, S, _ = x.shape
        q = self.q(x).unflatten(-1, (6, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 3, 4)).permute(2, 0, 3, 1, 4)
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2).reshape(B, S, 24)
        )


def build():
    torch.manual_seed(0)
    return Attn(), (torch.randn(2, 5, 24), torch.randn(2, 6, 5, 5)), {}

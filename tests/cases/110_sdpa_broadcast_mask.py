"""Situation: SDPA with bool padding mask (B,1,1,S), additive (1,H,S,S) ALiBi bias that needs grad
Fault: mask sharded like q on a broadcast dim
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "SDPA/flex"
SOURCE = "pytorch/pytorch#178207; pytorch/pytorch#181084; huggingface/transformers#40619"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.slope = nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, x, keep):
        S = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        d = (torch.arange(S)[None] - torch.arange(S)[:, None]).abs().float()
        bias = -self.slope[:, None, None] * d
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].expand(x.shape[0], -1, -1, -1))
        return a + F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])


def build():
    torch.manual_seed(0)
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 4:] = False
    return M(), (torch.randn(2, 6, 16), keep), {}

"""Situation: dropout inside scaled_dot_product_attention
Fault: attention mask RNG not synchronised over sharded heads
Right result: equal for the same seed, or named refusal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "dropout/RNG"
SOURCE = "pytorch/pytorch#146190; pytorch/xla#4690"
EXPECT = "equal"
MESHES = [(2,), (4,)]

ALSO_OK = "error:dropout"


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if self.training else 0.0)


def build():
    torch.manual_seed(0)
    return M().train(), (torch.randn(2, 5, 16),), {}

"""Situation: vocab-parallel logits, odd vocabulary, ignore_index mean, label outside the local
shard
Fault: about 1% loss difference, or mean rejected on 2D meshes
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "cross entropy"
SOURCE = "pytorch/pytorch#180936; deepspeedai/DeepSpeed#6882; bigscience-workshop/Megatron-DeepSpeed#394"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2), (3,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 13)

    def forward(self, x, y):
        z = self.l(x)
        return (
            F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=3)
            + 0.1 * F.cross_entropy(z.transpose(1, 2), y.clamp(min=0), reduction="sum") / 24
        )


def build():
    torch.manual_seed(0)
    y = torch.randint(0, 13, (4, 6))
    y[2:] = torch.where(y[2:] > 4, torch.tensor(3), y[2:])
    return M(), (torch.randn(4, 6, 6), y), {}

"""Situation: GroupNorm/InstanceNorm with channels or space possibly sharded; also affine=False
Fault: N/C/HxW arguments stay global; statistics per shard
Right result: equal
"""

import torch
from torch import nn

KIND = "norm layers"
SOURCE = "pytorch/pytorch#184825; pytorch/pytorch#133221; NVIDIA/physicsnemo#1421"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


def build():
    torch.manual_seed(0)
    m = nn.Sequential(
        nn.Conv2d(3, 12, 1),
        nn.GroupNorm(3, 12),
        nn.SiLU(),
        nn.GroupNorm(4, 12, affine=False),
        nn.InstanceNorm2d(12, affine=True),
        nn.Conv2d(12, 2, 1),
    )
    return m, (torch.randn(4, 3, 4, 4),), {}

"""Situation: 7x7 stride 2 padding 3 convolution then max-pool, batch sharded
Fault: rejected because of spatial constraints that do not apply to batch sharding
Right result: equal
"""

import torch
from torch import nn

KIND = "conv/pooling"
SOURCE = "pytorch/pytorch#176446; pytorch/PiPPy#744"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


def build():
    torch.manual_seed(0)
    m = nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return m, (torch.randn(4, 3, 16, 16),), {}

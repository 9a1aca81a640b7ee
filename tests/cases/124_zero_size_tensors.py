"""Situation: inputs and parameters with a zero dimension (no prefix tokens, empty adapter)
Fault: division by zero in cost model, chunk of an empty tensor
Right result: equal
"""

import torch
from torch import nn

KIND = "zero-size/scalar"
SOURCE = "pytorch/pytorch#110762; meta-pytorch/torchstore#177; PaddlePaddle/Paddle#63798"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.prefix = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x, extra):
        h = torch.cat([self.prefix.expand(0, 4), x, extra])
        return self.l(h).sum(0) + extra.sum()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 4), torch.randn(0, 4)), {}

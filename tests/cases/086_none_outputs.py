"""Situation: output tuple contains None and python constants
Fault: None dropped or positions shifted
Right result: same tuple
"""

import torch
from torch import nn

KIND = "None outputs"
SOURCE = "pytorch/pytorch#152827; pytorch/pytorch#182182"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]


class M(nn.Module):
    def __init__(self, cache=False):
        super().__init__()
        self.l = nn.Linear(4, 6)
        self.cache = cache

    def forward(self, x, mask=None):
        h = self.l(x)
        return None, h, (h.detach() if self.cache else None), 7


def loss(out):
    assert out[0] is None and out[2] is None and out[3] == 7
    return out[1].square().mean()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 4), None), {}

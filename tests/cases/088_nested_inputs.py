"""Situation: inputs are a dict of lists of tensors plus a tuple
Fault: pytree order of inputs differs between trace and call
Right result: equal, also when the dict is passed in another key order
"""

import torch
from torch import nn

KIND = "structured outputs"
SOURCE = "pytorch/pytorch#147326; pytorch/pytorch#167977"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, batch, pair):
        return self.l(batch["b"][0]) * pair[1] + sum(batch["a"]) - pair[0]


def build():
    torch.manual_seed(0)
    t = lambda: torch.randn(4, 4)
    return M(), ({"b": [t(), t()], "a": [t(), t()]}, (t(), t())), {}

"""Situation: parameters and buffers that the forward never touches; a submodule used only in eval
Fault: index error in the optimizer of the plan, dropped from state_dict, or zero instead of
None gradients
Right result: kept in state_dict, gradient None (as single device)
"""

import torch
from torch import nn

KIND = "unused params"
SOURCE = "meta-pytorch/autoparallel#368; pytorch/pytorch#186542; pytorch/pytorch#196996"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.dead = nn.Linear(7, 3)
        self.alone = nn.Parameter(torch.ones(5))
        self.register_buffer("unused", torch.arange(3.0))
        self.only_eval = nn.Linear(4, 4)

    def forward(self, x):
        y = self.l(x)
        return y if self.training else self.only_eval(y)


def build():
    torch.manual_seed(0)
    return M().train(), (torch.randn(4, 4),), {}

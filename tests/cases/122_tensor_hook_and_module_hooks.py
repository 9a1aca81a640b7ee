"""Situation: forward pre/post hooks and a gradient hook on a parameter (scale gradient by 0.5)
Fault: hooks run twice, or are dropped by tracing
Right result: equal, or refusal naming hooks
"""

import torch
from torch import nn

KIND = "custom autograd.Function"
SOURCE = "pytorch/pytorch#185331; NVIDIA/Megatron-LM#1596"
EXPECT = "equal"
MESHES = [(2,)]

ALSO_OK = "error:hook"


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.l.register_forward_hook(lambda m, i, o: o * 2)
        self.l.register_forward_pre_hook(lambda m, i: (i[0] + 1,))
        self.l.weight.register_hook(lambda g: g * 0.5)

    def forward(self, x):
        return self.l(x).tanh()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 4),), {}

"""Situation: linear recurrence through associative_scan (generic mode)
Fault: device check before lowering; decomposition unrecoverable
Right result: equal, or a refusal that names the op
"""

import torch
from torch import nn

KIND = "LSTM/scan"
SOURCE = "pytorch/pytorch#186594"
EXPECT = "equal"
MESHES = [(2,), (4,)]

ALSO_OK = "error:scan"
from torch._higher_order_ops.associative_scan import associative_scan


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 8)

    def forward(self, x):
        a, b = self.l(x).chunk(2, -1)
        _, h = associative_scan(
            lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (torch.sigmoid(a), b), dim=1, combine_mode="generic"
        )
        return h


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8, 4),), {}

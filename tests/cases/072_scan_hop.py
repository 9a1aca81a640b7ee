"""Situation: recurrence through the scan higher-order operator, weights captured by the body
Fault: closure over parameters / aliasing rejected; no sharding rule for the operator
Right result: equal, or a refusal that names the higher-order op
"""

import torch
from torch import nn

KIND = "LSTM/scan"
SOURCE = "pytorch/pytorch#148980; pytorch/pytorch#153705; pytorch/executorch#8769"
EXPECT = "equal"
MESHES = [(2,), (4,)]

ALSO_OK = "error:scan"
from torch._higher_order_ops.scan import scan


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4) * 0.3)
        self.u = nn.Linear(4, 4)

    def forward(self, x):
        def step(h, xt):
            n = torch.tanh(h @ self.w + xt)
            return n, n.clone()

        _, ys = scan(step, torch.zeros(x.shape[0], 4), self.u(x).transpose(0, 1))
        return ys.transpose(0, 1)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 5, 4),), {}

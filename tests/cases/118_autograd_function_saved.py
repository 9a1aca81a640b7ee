"""Situation: fused RMS-norm written as autograd.Function with saved intermediates and a reduction
in backward
Fault: weight gradient reduced over the local batch only
Right result: equal
"""

import torch
from torch import nn

KIND = "custom autograd.Function"
SOURCE = "pytorch/pytorch#128636; linkedin/Liger-Kernel#982"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class RMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, r)
        return x * r * w

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        n = x * r
        gw = (g * n).flatten(0, -2).sum(0)
        gn = g * w
        return r * (gn - n * (gn * n).mean(-1, keepdim=True)), gw


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)
        self.w = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        return RMS.apply(self.l(x), self.w)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 3, 6),), {}

"""Situation: custom autograd.Function whose backward is not the derivative (gradient reversal,
aux-loss injection)
Fault: backward replaced by the traced derivative of forward, or plain/sharded tensor mix
Right result: custom backward kept: equal
"""

import torch
from torch import nn

KIND = "custom autograd.Function"
SOURCE = "pytorch/pytorch#143134; pytorch/pytorch#173123"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class Rev(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.k * g, None


class AddAux(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, aux):
        ctx.save_for_backward(aux)
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        (aux,) = ctx.saved_tensors
        return g, torch.full_like(aux, 0.5)


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 6)
        self.h = nn.Linear(6, 2)
        self.r = nn.Linear(4, 3)

    def forward(self, x):
        y = self.h(Rev.apply(torch.tanh(self.f(x)), 0.3))
        return AddAux.apply(y, self.r(x).softmax(-1).square().sum(-1).mean())


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(6, 4),), {}

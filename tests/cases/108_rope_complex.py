"""Situation: rotary embedding through view_as_complex and a complex buffer
Fault: backward gives b+ai instead of a+bi; no rule for the view
Right result: equal
"""

import torch
from torch import nn

KIND = "complex"
SOURCE = "pytorch/pytorch#122569; pytorch/torchtitan#267"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)
        f = torch.outer(torch.arange(8.0), 100 ** (-torch.arange(0, 4, 2) / 4))
        self.register_buffer("cis", torch.polar(torch.ones_like(f), f), persistent=False)

    def rot(self, x):
        c = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(c * self.cis[: x.shape[1], None]).flatten(3)

    def forward(self, x):
        q, k = (self.rot(t.unflatten(-1, (4, 4))) for t in (self.q(x), self.k(x)))
        return torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)


def loss(out):
    return (out * torch.arange(out.shape[-1])).square().mean()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(2, 6, 16),), {}

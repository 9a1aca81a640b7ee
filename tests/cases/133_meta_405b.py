"""Situation: planning a 405B-parameter decoder on the meta device for 128+ devices; small twin for
numerics
Fault: planner materialises weights, or to_empty breaks ties and non-persistent buffers
Right result: plan without allocating parameters; buffers initialised; small twin equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "very large on meta"
SOURCE = "meta-pytorch/autoparallel#320; pytorch/torchtitan#1403; huggingface/accelerate#3154"
EXPECT = "equal"
MESHES = [(8, 16), (8, 8, 16)]


class Block(nn.Module):
    def __init__(self, d, h, kv, f):
        super().__init__()
        self.h, self.kv, self.dh = h, kv, d // h
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, kv * self.dh, bias=False)
        self.v = nn.Linear(d, kv * self.dh, bias=False)
        self.o = nn.Linear(d, d, bias=False)
        self.g = nn.Linear(d, f, bias=False)
        self.u = nn.Linear(d, f, bias=False)
        self.dn = nn.Linear(f, d, bias=False)

    def forward(self, x):
        B, S, _ = x.shape
        y = self.n1(x)
        q, k, v = (l(y).view(B, S, -1, self.dh).transpose(1, 2) for l in (self.q, self.k, self.v))
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )
        y = self.n2(x)
        return x + self.dn(F.silu(self.g(y)) * self.u(y))


class LM(nn.Module):
    def __init__(self, V, d, L, h, kv, f):
        super().__init__()
        self.e = nn.Embedding(V, d)
        self.bs = nn.ModuleList(Block(d, h, kv, f) for _ in range(L))
        self.n = nn.RMSNorm(d)
        self.out = nn.Linear(d, V, bias=False)

    def forward(self, ids):
        x = self.e(ids)
        for b in self.bs:
            x = b(x)
        return self.out(self.n(x))


def build_meta():
    with torch.device("meta"):
        return LM(128256, 16384, 126, 128, 8, 53248).to(torch.bfloat16), (torch.zeros(16, 8192, dtype=torch.long),), {}


def build():
    torch.manual_seed(0)
    return LM(64, 32, 2, 8, 2, 48), (torch.randint(0, 64, (4, 6)),), {}

"""Situation: one embedding registered under encoder.emb, decoder.emb and shared (T5 style)
Fault: empty tensor or untied copies in the state dict
Right result: equal and all names present
"""

import torch
from torch import nn

KIND = "tied weights"
SOURCE = "pytorch/pytorch#103189; huggingface/accelerate#3154"
EXPECT = "equal"
MESHES = [(2,), (4,), (3,)]


class Side(nn.Module):
    def __init__(self, emb):
        super().__init__()
        self.emb = emb
        self.l = nn.Linear(6, 6)

    def forward(self, ids):
        return torch.tanh(self.l(self.emb(ids)))


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(11, 6)
        self.enc = Side(self.shared)
        self.dec = Side(self.shared)

    def forward(self, src, tgt):
        e, d = self.enc(src), self.dec(tgt)
        a = torch.softmax(d @ e.transpose(1, 2), -1) @ e
        return (a + d) @ self.shared.weight.t()


def build():
    torch.manual_seed(0)
    return M(), (torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 3))), {}

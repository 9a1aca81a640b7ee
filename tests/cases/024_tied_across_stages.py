"""Situation: tied embedding/head where the pipeline cut puts the two uses on different stages
Fault: each stage updates its own copy; gradients never summed
Right result: summed gradient on both copies, or both uses kept on one stage
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "shared across stages"
SOURCE = "pytorch/PiPPy#32; uw-syfi/piper#13; NVIDIA/Megatron-LM#844; mindspore-ai/hyper-parallel#382"
EXPECT = "equal"
MESHES = [(2,), (2, 2), (4,)]


class LM(nn.Module):
    def __init__(self, v=29, d=8, tie=True):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(4)
        )
        self.head = nn.Linear(d, v, bias=False)
        if tie:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = h + b(h)
        return self.head(h)


def loss(out):
    g = torch.Generator().manual_seed(7)
    t = torch.randint(0, out.shape[-1], out.shape[:-1], generator=g)
    return F.cross_entropy(out.flatten(0, 1), t.flatten())


PIPELINE_STAGES = 2


def build():
    torch.manual_seed(0)
    return LM(), (torch.randint(0, 29, (4, 5)),), {}

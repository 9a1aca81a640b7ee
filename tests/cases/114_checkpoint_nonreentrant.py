"""Situation: torch.utils.checkpoint(use_reentrant=False) around each block
Fault: region becomes a higher-order op with un-lowered body; or checkpointing silently dropped
Right result: equal, recompute kept or its loss reported
"""

import torch
from torch import nn

KIND = "checkpointed modules"
SOURCE = "pytorch/pytorch#161479; pytorch/pytorch#159546; meta-pytorch/autoparallel#460"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

PIPELINE_STAGES = 2
from torch.utils.checkpoint import checkpoint


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.bs = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x):
        for b in self.bs:
            x = x + checkpoint(b, x, use_reentrant=False)
        return x


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}

"""Situation: plan saved on (4,) replayed on (2,2) or (2,)
Fault: placements reinterpreted on another mesh
Right result: refusal that names both meshes (or explicit re-planning)
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "plan replay"
SOURCE = "meta-pytorch/autoparallel#460; pytorch/torchtitan#811; NVIDIA-NeMo/Speech#8460"
EXPECT = "error:mesh"
MESHES = [(4,)]


class M(nn.Module):
    def __init__(self, f=16):
        super().__init__()
        self.a = nn.Linear(8, f)
        self.b = nn.Linear(f, 8)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}


REPLAY = True
REPLAY_MESHES = [(2, 2), (2,), (3,)]

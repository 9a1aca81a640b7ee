"""Situation: plan saved under another torch version / plan format version
Fault: graph differs after an upgrade: import or key errors
Right result: refusal or re-plan that names the version
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "plan replay"
SOURCE = "meta-pytorch/autoparallel#160; meta-pytorch/autoparallel#241"
EXPECT = "error:version"
MESHES = [(2,)]


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


def edit_plan(plan):
    """Set every version-like field to something old."""

    def walk(o):
        if isinstance(o, dict):
            return {k: ("0.0.1" if "version" in k.lower() else walk(v)) for k, v in o.items()}
        return [walk(v) for v in o] if isinstance(o, list) else o

    return walk(plan)

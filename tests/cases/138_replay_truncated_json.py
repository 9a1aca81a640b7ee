"""Situation: plan file cut in half, empty, not JSON, wrong encoding, or a JSON list
Fault: raw JSONDecodeError / KeyError from deep inside, or partial plan accepted
Right result: one clear error that names the plan file
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "corrupted plan JSON"
SOURCE = "meta-pytorch/autoparallel#460; pytorch/pytorch#148252"
EXPECT = "error:plan"
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


def edit_bytes(raw):
    return [raw[: len(raw) // 2], b"", b"\xff\xfe\x00", b"[]", b"null", b"{}", raw.replace(b"}", b"", 1), raw + b"{"]

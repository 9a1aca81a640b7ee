"""Situation: mesh with a single device
Fault: strategy enumeration fails on a world of one
Right result: equal, no collectives
"""

import torch
from torch import nn

KIND = "degenerate meshes"
SOURCE = "meta-pytorch/autoparallel#73"
EXPECT = "equal"
MESHES = [(1,)]


def build():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 7)),
        (torch.randint(0, 7, (2, 3)),),
        {},
    )

"""Situation: from 4 to 3 devices: optimizer and parameters of uneven sizes resharded
Fault: shards with size 0 or missing keys on the new mesh
Right result: equal to single device before and after
"""

import torch
from torch import nn

KIND = "device failure"
SOURCE = "pytorch/torchtitan#811; KempnerInstitute/KempnerForge#3; pytorch/pytorch#108869"
EXPECT = "equal"
MESHES = [(4,), (2, 2)]

FAULT = {"kind": "shrink", "to": 3, "step": 2}
STEPS = 4


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 7)), (torch.randn(12, 5),), {}

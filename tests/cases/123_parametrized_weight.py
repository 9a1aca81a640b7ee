"""Situation: weight_norm / spectral-like parametrization: weight computed from g and v
Fault: parameter names change, computed weight sharded without its norm reduced
Right result: equal for g and v
"""

import torch
from torch import nn

KIND = "tied weights"
SOURCE = "meta-pytorch/autoparallel#321 (names must survive); no direct report found"
EXPECT = "equal"
MESHES = [(2,), (4,)]


def build():
    torch.manual_seed(0)
    wn = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(wn(nn.Linear(4, 8)), nn.Tanh(), wn(nn.Linear(8, 3), dim=None)), (torch.randn(4, 4),), {}

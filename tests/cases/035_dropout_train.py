"""Situation: dropout in train mode with sharded activations
Fault: mask differs from single device, or every rank draws the same mask
Right result: same mask as single device for the same seed; otherwise a named refusal/option
"""

import torch
from torch import nn

KIND = "dropout/RNG"
SOURCE = "pytorch/pytorch#168058; pytorch/pytorch#146190"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]

ALSO_OK = "error:dropout"


def build():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4), nn.Dropout(0.1)).train(),
        (torch.randn(8, 8),),
        {},
    )

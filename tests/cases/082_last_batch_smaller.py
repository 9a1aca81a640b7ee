"""Situation: pipeline with 3 microbatches and batch 8 (sizes 3,3,2), static plan
Fault: stage buffers keep the size of the first microbatch
Right result: equal, or refusal naming microbatch size
"""

import torch
from torch import nn

KIND = "dynamic dims"
SOURCE = "pytorch/pytorch#126600; pytorch/PiPPy#192"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

PIPELINE_STAGES = 2
MICROBATCHES = 3
ALSO_OK = "error:microbatch"


def build():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        (torch.randn(8, 4),),
        {},
    )

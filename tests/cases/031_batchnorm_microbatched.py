"""Situation: BatchNorm in train mode inside a pipeline with 4 microbatches
Fault: statistics are per microbatch and the running stats move 4 times (or metadata probing
moves them)
Right result: refuse (naming batch norm / microbatches) or defer statistics; never silently
differ
"""

import torch
from torch import nn

KIND = "buffers"
SOURCE = "kakaobrain/torchgpipe#14; kakaobrain/torchgpipe#35; pytorch/pytorch#188763"
EXPECT = "error:batch"
MESHES = [(2,)]

PIPELINE_STAGES = 2
MICROBATCHES = 4
ALSO_OK = "equal"
COMPARE_BUFFERS = True


def build():
    torch.manual_seed(0)
    return (
        nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        ).train(),
        (torch.randn(8, 4),),
        {},
    )

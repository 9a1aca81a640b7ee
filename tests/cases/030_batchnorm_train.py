"""Situation: conv + BatchNorm in train mode, batch sharded
Fault: per-rank statistics instead of global, backward never terminates, running stats differ
per rank
Right result: global batch statistics; running_mean/var/num_batches_tracked equal the single
device run
"""

import torch
from torch import nn

KIND = "buffers"
SOURCE = "pytorch/pytorch#182739; pytorch/pytorch#182743; pytorch/pytorch#99662"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2), (3,)]

COMPARE_BUFFERS = True


def build():
    torch.manual_seed(0)
    m = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)
    ).train()
    return m, (torch.randn(12, 2, 4, 4),), {}

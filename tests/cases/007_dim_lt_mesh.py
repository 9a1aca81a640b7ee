"""Situation: batch 2 with 4 ranks (or batch sharded on both axes of a 2D mesh)
Fault: planner emits a sharding of a dim smaller than the number of shards
Right result: never shard below 1 per rank unless empties are handled; equal
"""

import torch
from torch import nn

KIND = "uneven sharding"
SOURCE = "meta-pytorch/autoparallel#22; alpa-projects/alpa#543"
EXPECT = "equal"
MESHES = [(4,), (2, 2), (2, 4)]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)), (torch.randn(2, 3, 8),), {}

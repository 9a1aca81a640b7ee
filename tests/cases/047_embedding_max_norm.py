"""Situation: Embedding(max_norm=1): the look-up rewrites weight rows in place
Fault: weight mutation dropped or internal error
Right result: equal including the rewritten weight, or a refusal that names the embedding /
mutation
"""

import torch
from torch import nn

KIND = "embedding padding_idx"
SOURCE = "pytorch/pytorch#93950; pytorch/pytorch#186470"
EXPECT = "error:"
MESHES = [(2,)]

ALSO_OK = "equal"


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2)), (torch.randint(0, 9, (3, 4)),), {}

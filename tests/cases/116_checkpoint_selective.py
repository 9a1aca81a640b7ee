"""Situation: selective checkpointing with a policy function (save matmuls only)
Fault: policy cannot be traced / saved more tensors in recompute
Right result: equal
"""

import torch
from torch import nn

KIND = "checkpointed modules"
SOURCE = "pytorch/pytorch#193338; pytorch/torchtitan#1971"
EXPECT = "equal"
MESHES = [(2,)]

import functools

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def policy(ctx, op, *a, **k):
    return (
        CheckpointPolicy.MUST_SAVE
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return checkpoint(
            self.b, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
        )


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}

"""Situation: clip_grad_norm_ (p=2 and inf) over parameters with different placements / meshes
Fault: replicated parameters counted once per rank, partial norms not reduced, stack of
different meshes fails
Right result: same total norm and clipped gradients
"""

import torch
from torch import nn

KIND = "gradient clipping"
SOURCE = "pytorch/pytorch#180346; pytorch/torchtitan#596; pytorch/torchtitan#649; NVIDIA-NeMo/RL#3788; meta-pytorch/torchtune#2420"
EXPECT = "equal"
MESHES = [(2,), (4,), (2, 2)]


def post(model):
    ps = [p for p in model.parameters() if p.grad is not None]
    inf = max(float(p.grad.abs().max()) for p in ps)
    total = torch.nn.utils.clip_grad_norm_(ps, 0.05)
    return {"total": float(total), "inf": inf, "after": float(sum(p.grad.square().sum() for p in ps))}


def build():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3, bias=False)),
        (torch.randn(8, 4) * 3,),
        {},
    )

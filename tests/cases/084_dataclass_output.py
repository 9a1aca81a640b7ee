"""Situation: model returns an unregistered dataclass with optional fields
Fault: export error about an unsupported object, unclear message
Right result: same dataclass back, or refusal that says how to register it
"""

import torch
from torch import nn

KIND = "structured outputs"
SOURCE = "pytorch/pytorch#106160; pytorch/pytorch#109152; pytorch/pytorch#147400; pytorch/pytorch#112211"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

ALSO_OK = "error:dataclass"
import dataclasses


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    name: str = "x"


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 6)

    def forward(self, x):
        h = self.l(x)
        return Out(logits=h, hidden=h.tanh())


def loss(out):
    return out.logits.square().mean() + out.hidden.mean()


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 4),), {}

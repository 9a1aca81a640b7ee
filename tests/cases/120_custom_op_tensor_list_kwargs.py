"""Situation: custom op with a tensor list argument, optional tensor and tuple result
Fault: spec counting assertion for list / keyword tensors
Right result: equal, or refusal naming the op
"""

import torch
from torch import nn

KIND = "custom ops"
SOURCE = "pytorch/pytorch#167977; pytorch/pytorch#191488; pytorch/pytorch#172829; pytorch/pytorch#167435"
EXPECT = "equal"
MESHES = [(2,), (4,)]

ALSO_OK = "error:hardcases::combine"


@torch.library.custom_op("hardcases::combine", mutates_args=())
def combine(
    xs: list[torch.Tensor], scale: torch.Tensor | None = None, alpha: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.stack(xs).sum(0) * alpha
    return (s if scale is None else s * scale), s.mean(0)


@combine.register_fake
def _(xs, scale=None, alpha=1.0):
    return torch.empty_like(xs[0]), torch.empty_like(xs[0][0])


def _setup(ctx, inputs, output):
    ctx.n, ctx.alpha, ctx.rows = len(inputs[0]), inputs[2], inputs[0][0].shape[0]


def _bwd(ctx, g, gm):
    return [(g + gm / ctx.rows) * ctx.alpha for _ in range(ctx.n)], None, None


torch.library.register_autograd("hardcases::combine", _bwd, setup_context=_setup)


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        y, m = combine([self.a(x), self.b(x)], alpha=0.5)
        return y + m


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(6, 4),), {}

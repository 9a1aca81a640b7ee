"""Situation: bf16 parameters, rotary inverse-frequency buffer in fp32, positions near 4000
Fault: blanket cast makes the buffer bf16: phase off by radians
Right result: buffer stays fp32, result equals the single device bf16 run
"""

import torch
from torch import nn

KIND = "buffers"
SOURCE = "deepspeedai/DeepSpeed#8066; huggingface/transformers#29496; Modalities/modalities#462; pytorch/pytorch#146114"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

TOL = 2e-2


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8).to(torch.bfloat16)
        self.register_buffer("inv", 10000 ** (-torch.arange(0, 8, 2) / 8), persistent=False)

    def forward(self, x, pos):
        f = (pos[:, None].float() * self.inv).repeat(1, 2)
        return self.l(x * f.cos().to(x.dtype)).float().sum(-1)


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 6, 8, dtype=torch.bfloat16), torch.arange(4000, 4006)), {}

"""Situation: distillation: KL(batchmean), BCE with pos_weight, cosine loss, smooth L1 together
Fault: batchmean divides by the local batch
Right result: equal
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "cross entropy"
SOURCE = "PaddlePaddle/Paddle#56507; modelscope/twinkle#292"
EXPECT = "equal"
MESHES = [(2,), (4,)]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 6)

    def forward(self, x, t):
        z = self.l(x)
        p = t.softmax(-1)
        return (
            F.kl_div(z.log_softmax(-1), p, reduction="batchmean")
            + F.binary_cross_entropy_with_logits(z, p, pos_weight=torch.arange(1.0, 7.0))
            + F.cosine_embedding_loss(z, t, torch.ones(x.shape[0]))
            + F.smooth_l1_loss(z, t)
            + F.cross_entropy(z, p)
        )


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(6, 4), torch.randn(6, 6)), {}

"""Situation: model with submodules called code and graph and a parameter called shape
Fault: torch.export passes, then the exported module cannot be run: 'references nonexistent
attribute weight of code'
Right result: equal and original names in state_dict, or a refusal that names the submodule
"""

import torch
from torch import nn

KIND = "reserved names"
SOURCE = "found while writing these cases (torch.fx.GraphModule has properties called code and graph)"
EXPECT = "equal"
MESHES = [(2,), (2, 2)]

ALSO_OK = "error:code"


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.code = nn.Embedding(7, 4)
        self.graph = nn.Linear(4, 4)
        self.shape = nn.Parameter(torch.ones(4))

    def forward(self, ids):
        return self.graph(self.code(ids)) * self.shape


def build():
    torch.manual_seed(0)
    return M(), (torch.randint(0, 7, (4, 3)),), {}

"""Situation: plan JSON with hostile values: dims out of range, negative or huge integers, NaN,
missing/duplicate keys, 10^5-deep nesting, code-like strings
Fault: eval/pickle of the content, hang, or memory blow-up
Right result: refused quickly; nothing executed
"""

import torch
import torch.nn.functional as F
from torch import nn

KIND = "corrupted plan JSON"
SOURCE = "pytorch/pytorch#189308; ecmwf/anemoi-core#1416; NVIDIA-NeMo/Automodel#3240"
EXPECT = "error:plan"
MESHES = [(2,)]


class M(nn.Module):
    def __init__(self, f=16):
        super().__init__()
        self.a = nn.Linear(8, f)
        self.b = nn.Linear(f, 8)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


def build():
    torch.manual_seed(0)
    return M(), (torch.randn(4, 8),), {}


REPLAY = True


def edit_plan_variants(plan):
    import copy

    def mutate(fn):
        p = copy.deepcopy(plan)

        def walk(o):
            if isinstance(o, dict):
                return {k: walk(v) for k, v in o.items()}
            if isinstance(o, list):
                return [walk(v) for v in o]
            return fn(o)

        return walk(p)

    yield "ints+1000", mutate(lambda v: v + 1000 if type(v) is int else v)
    yield "ints negative", mutate(lambda v: -5 if type(v) is int else v)
    yield "ints 2**70", mutate(lambda v: 2**70 if type(v) is int else v)
    yield "strings code", mutate(lambda v: "__import__('os').abort()" if isinstance(v, str) else v)
    yield "all null", mutate(lambda v: None)
    yield "floats nan", mutate(lambda v: float("nan") if isinstance(v, (int, float)) else v)


def edit_bytes(raw):
    return [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000,
        raw.replace(b"Shard", b"Partial"),
        raw.replace(b'"', b"'"),
    ]

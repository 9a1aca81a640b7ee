from __future__ import annotations

import re
import resource
from itertools import filterfalse

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.passes import capture, op_name
from meshwright.passes.keeping import is_keep

from .eager import assert_equal_to_eager, layer, real


class Block(nn.Module):
    def __init__(self, width: int, wide: int, device: str | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, device=device)
        self.gate = nn.Linear(width, wide, bias=False, device=device)
        self.up = nn.Linear(width, wide, bias=False, device=device)
        self.down = nn.Linear(wide, width, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int, wide: int, words: int, device: str | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, device=device)
        self.layers = nn.ModuleList(Block(width, wide, device) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)


def test_names_are_stable_unique_and_the_users_own() -> None:
    model, tokens = Stack(3, 8, 12, 20), torch.zeros(2, 5, dtype=torch.int64)
    first, second = capture(model, (tokens,)), capture(model, (tokens,))
    names = [first.names[n] for n in first.ops()]
    assert names == [second.names[n] for n in second.ops()]
    assert len(set(first.names.values())) == len(first.names)
    paths = {"", *(name for name, _ in model.named_modules())}
    for node in filterfalse(is_keep, first.ops()):
        match = re.fullmatch(r"(.*)::(bwd\.)?([A-Za-z_]\w*(?:\.\w+)?)\.(\d+)", first.names[node])
        assert match is not None
        assert match[1] in paths
        assert match[3] == op_name(node)
        assert bool(match[2]) == (node in first.backward)
    assert not [name for name in first.names.values() if re.search(r"primals|tangents_|_\d+(\.|$)", name)]
    assert {"layers.2.down::einsum.0", "layers.2.down::bwd.einsum.0", "args.0", "tangent.0"} <= {*first.names.values()}


def test_blocks_of_a_kind_have_the_same_names_but_for_their_number() -> None:
    captured = capture(Stack(3, 8, 12, 20), (torch.zeros(2, 5, dtype=torch.int64),))
    of = [
        sorted(n.removeprefix(f"layers.{i}.") for n in captured.names.values() if n.startswith(f"layers.{i}."))
        for i in (1, 2)
    ]
    assert of[0] == of[1] != []


def test_modules_and_parameters_may_have_the_names_of_attributes_of_graphs() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = layer()
            self.graph = layer()
            self.shape = nn.Parameter(real(4))
            self.register_buffer("device", real(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.graph(self.code(x)) * self.shape + self.device

    captured = assert_equal_to_eager(Odd(), (real(3, 4),))
    assert {"code.weight", "graph.bias", "shape"} <= set(captured.grads)


def test_a_model_of_the_size_of_llama_405b_is_captured_without_its_weights() -> None:
    """Two of the 126 blocks: 7 billion parameters, 28 GB in float32."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Stack(2, 16384, 53248, 128256, device="meta")
    captured = capture(model, (torch.zeros(8, 8192, dtype=torch.int64, device="meta"),))
    assert sum(p.numel() for p in model.parameters()) > 6e9
    assert set(captured.grads) == {name for name, _ in model.named_parameters()}
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 500e6

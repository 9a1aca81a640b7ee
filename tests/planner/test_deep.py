"""Deep models are captured by three blocks where these stand for all, and whole where they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright import Mesh
from meshwright.planner.api import draft
from meshwright.planner.checking.verify import usual_cluster

DEPTH = 6


class Inside(nn.Module):
    """Everything of a block is in the block; batch norms hold buffers that the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Between(nn.Module):
    """The model adds the residual itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


class States(Between):
    """All hidden states are outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1]))
        return tuple(found)


class Cross(nn.Module):
    """A block of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x + table)


class Bias(nn.Module):
    """One table that every block reads: its gradient is a sum over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))
        self.blocks = nn.ModuleList(Cross() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.tanh()
        for block in self.blocks:
            x = block(x, table)
        return x


class Slices(Between):
    """Each block has its own part of an input."""

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, :4]
        for i, block in enumerate(self.blocks):
            h = block(h * x[:, i : i + 1])
        return h


def deep() -> nn.Module:
    return nn.Sequential(*(Inside() for _ in range(DEPTH)))


@pytest.mark.parametrize(
    ("build", "cut"), [(deep, True), (Between, False), (States, False), (Bias, False), (Slices, False)]
)
def test_three_blocks_are_captured_only_where_they_stand_for_all(build: Callable[[], nn.Module], cut: bool) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(8, DEPTH if build is Slices else 4)
    mesh = Mesh.of((2,))
    prepared = draft(model, (x,), cluster=usual_cluster(mesh), mesh=mesh)
    assert bool(prepared.blocks.cut) == cut
    for seed in range(3):
        report = meshwright.check(model, (x,), mesh=mesh, random=1, seed=seed, steps=2)
        assert report.equal, report

"""Small models and random pipelines of them: any cut of the ops, any placement, any order that the data allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from meshwright.passes.graph import Captured
from meshwright.passes.microbatches import microbatch
from meshwright.passes.places import forward_ops
from meshwright.passes.stages import cut_stages
from meshwright.planner.api import draft
from meshwright.planner.checking.verify import random_plan, usual_cluster
from meshwright.planner.stages.crossings import Side, crossings_of, on_meshes
from meshwright.plans import Action, Mesh, Pipeline, Plan, RequestError, Schedule

__all__ = ["Tied", "Twisted", "batch_of", "mixed", "pipelined", "random_firsts", "random_schedule"]


class Twisted(nn.Module):
    """Layers with a skip over all of them, a buffer that the forward changes, an input that is no batch and a loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(layers)])
        self.gain = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(6))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        first = x * self.gain
        h = first
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * weight
        self.seen.add_(weight)
        a, b = (h + first).chunk(2, dim=1)
        return ((a * b).sum(1) - target).square().mean()


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            h = torch.relu(block(h)) + h
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batch_of(model: nn.Module, size: int = 4) -> tuple[torch.Tensor, ...]:
    """A batch for one of the models here."""
    torch.manual_seed(1)
    if isinstance(model, Tied):
        return torch.randint(12, (size, 5)), torch.randint(12, (size, 5))
    return torch.randn(size, 6).double(), torch.rand(6).double(), torch.randn(size).double()


def random_firsts(captured: Captured, stages: int, rng: random.Random) -> tuple[str, ...]:
    """A cut at any ops between which the model can be cut."""
    names = [captured.names[node] for node in forward_ops(captured)]
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(names)), stages - 1))
        firsts = ("", *(names[cut] for cut in cuts))
        try:
            cut_stages(captured, firsts)
        except RequestError:
            continue
        return firsts
    raise AssertionError("no cut was found")


def random_schedule(stages: int, ranks: int, microbatches: int, rng: random.Random) -> Schedule:
    """Any placement, W split or not by stage and micro-batch, in any order that the data allows."""
    places = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(places)
    split = {(s, m): rng.random() < 0.5 for s in range(stages) for m in range(microbatches)}
    done: set[tuple[int, str, int]] = set()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    left = [
        (s, kind, m) for s in range(stages) for m in range(microbatches) for kind in ("FIW" if split[s, m] else "FB")
    ]

    def ready(action: tuple[int, str, int]) -> bool:
        stage, kind, m = action
        if kind == "W":
            earlier = all((stage, "W", n) in done for n in range(m) if split[stage, n])
            return (stage, "I", m) in done and earlier
        if any((stage, k, n) not in done for n in range(m) for k in ("F" if kind == "F" else _back(split, stage, n))):
            return False
        if kind == "F":
            return stage == 0 or (stage - 1, "F", m) in done
        above = stage + 1 == stages or (stage + 1, _back(split, stage + 1, m), m) in done
        return (stage, "F", m) in done and above

    while left:
        action = rng.choice([a for a in left if ready(a)])
        left.remove(action)
        done.add(action)
        rows[places[action[0]]].append(Action(action[0], action[1], action[2]))
    return Schedule(microbatches=microbatches, placement=tuple(places), actions=tuple(tuple(row) for row in rows))


def _back(split: dict[tuple[int, int], bool], stage: int, microbatch: int) -> str:
    return "I" if split[stage, microbatch] else "B"


def pipelined(
    model: nn.Module,
    args: tuple,
    *,
    mesh: str,
    schedule: Schedule,
    seed: int,
    recompute: Any = "none",
    firsts: Any = None,
) -> tuple[Plan, Captured]:
    """A random plan for a stage's mesh with a random cut (or `firsts`) run by `schedule`, and the capture it is of."""
    grid = Mesh.parse(mesh)
    one = microbatch(args, {}, schedule.microbatches)
    prepared = draft(model, *one, cluster=usual_cluster(grid), mesh=grid, recompute=recompute, whole=True)
    firsts = firsts or random_firsts(prepared.captured, schedule.stages, random.Random(seed))
    plan = random_plan(prepared, seed)
    cluster = usual_cluster(Mesh.of((schedule.ranks * grid.size,)))
    pipeline = Pipeline.of(firsts, schedule, reduce_gradients="microbatch" if seed % 4 == 1 else "step")
    pipeline.check()
    return msgspec.structs.replace(plan, pipeline=pipeline, cluster=cluster), prepared.captured


def mixed(
    model: nn.Module,
    args: tuple,
    *,
    meshes: Sequence[str],
    schedule: Schedule,
    seed: int,
    recompute: Any = "none",
    firsts: Any = None,
) -> tuple[Plan, Captured]:
    """As `pipelined`, with the mesh `meshes[r]` for pipeline rank r, a random plan for each and random ways between."""
    rng = random.Random(seed)
    one = microbatch(args, {}, schedule.microbatches)
    grids = [Mesh.parse(text) for text in dict.fromkeys(meshes)]
    drafts = [draft(model, *one, cluster=usual_cluster(g), mesh=g, recompute=recompute, whole=True) for g in grids]
    captured = drafts[0].captured
    firsts = firsts or random_firsts(captured, schedule.stages, rng)
    pipeline = Pipeline.of(firsts, schedule, reduce_gradients="microbatch" if seed % 4 == 1 else "step")
    pipeline.check()
    cluster = usual_cluster(Mesh.of((sum(Mesh.parse(text).size for text in meshes),)))
    views = [
        msgspec.structs.replace(random_plan(made, seed + at), pipeline=pipeline, cluster=cluster)
        for at, made in enumerate(drafts)
    ]
    numbers = [list(dict.fromkeys(meshes)).index(text) for text in meshes]
    ways = [made.formulation.transitions for made in drafts]
    sides = [Side(at, view, way) for at, (view, way) in enumerate(zip(views, ways, strict=True))]
    places = [sides[numbers[rank]] for rank in schedule.placement]
    found = crossings_of(cut_stages(captured, firsts), places, lambda size: 1e-6 + size / 1e9, rng.choice)
    return on_meshes(views, numbers, [way.crossing for way in found]) if len(views) > 1 else views[0], captured

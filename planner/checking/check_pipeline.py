"""Check of a pipeline: do its stages, run by their schedule, compute what one process computes on the whole batch?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...passes.graph import Captured
from ...passes.hooks import refuse_hooks
from ...passes.microbatches import microbatches, sizes_of, weights
from ...passes.simulate import assemble, piece
from ...passes.stage_simulate import run_pipeline
from ...passes.stage_work import StageGraphs, StageWork, stage_graphs
from ...passes.stages import StageProgram, cut_stages
from ...passes.trees import flatten_call
from ...plans.errors import CheckError
from ...plans.meshes import Mesh
from ...plans.plan import Plan
from .check import EPS, Record

__all__ = ["simulate_pipeline"]


def simulate_pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    captured: Captured,
    plan: Plan,
    *,
    smaller: Captured | None = None,
    steps: int = 3,
    seed: int = 0,
) -> Record:
    """What `planner.check.train` records of AdamW steps, from the simulated ranks of `plan`, which has a pipeline.

    `captured` is the model on the first micro-batch, with its loss, `smaller` the same on the last where that has fewer
    samples; `args` and `kwargs` are the whole batch.
    """
    refuse_hooks(model)
    return _Simulation(model, args, kwargs, [captured, *([smaller] if smaller else [])], plan).train(steps, seed)


class _Simulation:
    """All stages on all ranks. A parameter that several pipeline ranks hold is there once for each, as it would be."""

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], by_size: Sequence[Captured], plan: Plan
    ) -> None:
        assert plan.pipeline is not None
        self.model, self.plan, self.meshes, self.pipeline = model, plan, plan.meshes(), plan.pipeline
        cuts = [cut_stages(captured, [stage.first for stage in plan.pipeline.stages]) for captured in by_size]
        self.stages, captured = cuts[0], by_size[0]
        self.places = [stage.rank for stage in plan.pipeline.stages]
        # By size of micro-batch, stage and rank of the mesh.
        self.graphs = [[self._graphs(stage, plan) for stage in stages] for stages in cuts]
        self.tensors, self.tree = flatten_call(args, kwargs)
        self.parts = microbatches(self.tensors, self.tree, plan.pipeline.microbatches)
        self.weights = weights(self.tensors, plan.pipeline.microbatches)
        self.sources = {s.name: s for s in captured.sources.values()}
        # By pipeline rank, rank of the mesh and name.
        self.held: list[list[dict[str, torch.Tensor]]] = [[{} for _ in range(mesh.size)] for mesh in self.meshes]
        # By pipeline rank and name.
        self.layouts: list[dict[str, Any]] = [{} for _ in self.meshes]
        for stage, graphs in enumerate(self.graphs[0]):
            self._hold(stage, graphs)

    def _graphs(self, stage: StageProgram, plan: Plan) -> list[StageGraphs]:
        """A stage's graphs on each rank of its mesh."""
        mesh = self._mesh(stage.index)
        groups = [f"axis:{axis}" for axis in range(mesh.ndim)]
        return [stage_graphs(stage, plan, coordinate, groups) for coordinate in mesh.coordinates()]

    def _mesh(self, stage: int) -> Mesh:
        return self.meshes[self.places[stage]]

    def _hold(self, stage: int, graphs: list[StageGraphs]) -> None:
        place, mesh = self.places[stage], self._mesh(stage)
        for rank, (one, coordinate) in enumerate(zip(graphs, mesh.coordinates(), strict=True)):
            held = self.held[place][rank]
            for source in one.stage.captured.sources.values():
                self.layouts[place][source.name] = one.layouts[source.name]
                if source.kind == "input" or source.name in held:
                    continue
                path, _, key = source.name.rpartition(".")
                whole = getattr(self.model.get_submodule(path), key).detach()
                held[source.name] = piece(whole, one.layouts[source.name], mesh, coordinate)

    def train(self, steps: int, seed: int) -> Record:
        record = Record()
        optimizers = [[self._optimizer(held) for held in ranks] for ranks in self.held]
        for step in range(steps):
            torch.manual_seed(seed + step)
            gradients = self._step(record, step)
            for held, optimizer, found in zip(_flat(self.held), _flat(optimizers), _flat(gradients), strict=True):
                for name, tensor in held.items():
                    if isinstance(tensor, nn.Parameter):
                        tensor.grad = found.get(name)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
        for name, source in self.sources.items():
            if source.kind in ("parameter", "buffer"):
                record.put(source.kind, name, self._whole(name, self.held, name))
        return record

    def _optimizer(self, held: dict[str, torch.Tensor]) -> torch.optim.Optimizer | None:
        for name in held:
            if self.sources[name].kind == "parameter" and self.sources[name].requires_grad:
                held[name] = nn.Parameter(held[name])
        trained = [tensor for tensor in held.values() if isinstance(tensor, nn.Parameter)]
        return torch.optim.AdamW(trained, lr=1e-3, eps=EPS, foreach=False) if trained else None

    def _step(self, record: Record, step: int) -> list[list[dict[str, torch.Tensor]]]:
        """Every rank's gradients by name."""
        works: list[list[StageWork]] = []
        for stage in range(len(self.stages)):
            by_size = zip(*(graphs[stage] for graphs in self.graphs), strict=True)
            mesh = self._mesh(stage)
            ranks = zip(by_size, self.held[self.places[stage]], mesh.coordinates(), strict=True)
            works.append([self._work(graphs, held, mesh, coordinate) for graphs, held, coordinate in ranks])
        run_pipeline(self.pipeline.order, works, self.meshes)
        for stage, ranks in enumerate(works):
            for held, work in zip(self.held[self.places[stage]], ranks, strict=True):
                held.update(work.changed())
        gradients = self._gradients(works)
        self._record(record, step, works, gradients)
        return gradients

    def _gradients(self, works: list[list[StageWork]]) -> list[list[dict[str, torch.Tensor]]]:
        """Each rank's gradients, those of shared parameters summed over all stages that hold them."""
        own: list[list[dict[str, torch.Tensor]]] = [[{} for _ in range(mesh.size)] for mesh in self.meshes]
        for stage, ranks in enumerate(works):
            for total, work in zip(own[self.places[stage]], ranks, strict=True):
                for name, gradient in work.gradients.items():
                    total[name] = total[name] + gradient if name in total else gradient
        for name, source in self.sources.items():
            holders = [rank for rank, held in enumerate(self.held) if name in held[0]]
            if source.kind != "parameter" or len(holders) < 2 or not any(name in own[rank][0] for rank in holders):
                continue
            wholes = [
                self._assembled(name, own, rank, f"gradient of {name}") for rank in holders if name in own[rank][0]
            ]
            whole = torch.stack(wholes).sum(0)
            for rank in holders:
                for total, at in zip(own[rank], self.meshes[rank].coordinates(), strict=True):
                    total[name] = piece(whole, self.layouts[rank][name], self.meshes[rank], at)
        return own

    def _work(
        self, by_size: tuple, held: dict[str, torch.Tensor], mesh: Mesh, coordinate: tuple[int, ...]
    ) -> StageWork:
        """One stage on one rank; `by_size` are its graphs for micro-batches of the first size, and of the last."""
        largest = max(sizes := sizes_of(self.tensors, self.pipeline.microbatches))
        graphs = [by_size[0] if size == largest else by_size[-1] for size in sizes]
        batches = [
            {
                n: piece(t.detach(), one.layouts[n], mesh, coordinate)
                for n, t in zip(self.tree.names, part, strict=True)
                if n in one.program.sources
            }
            for one, part in zip(graphs, self.parts, strict=True)
        ]
        return StageWork(graphs, held, batches, self.weights)

    def _record(self, record: Record, step: int, works: list[list[StageWork]], gradients: list) -> None:
        losses = [work.results for ranks in works for work in ranks[:1] if work.results]
        parts = [losses[0][0, index] * weight for index, weight in enumerate(self.weights)]
        record.put("loss", f"step {step}", torch.stack(parts).sum().reshape(1))
        for name, source in self.sources.items():
            if source.kind == "parameter" and source.requires_grad:
                record.put("gradient", f"{name} step {step}", self._whole(name, gradients, f"gradient of {name}"))
        for name, tensor in zip(self.tree.names, self.tensors, strict=True):
            record.put("input", f"{name} step {step}", tensor)

    def _whole(self, name: str, ranks: list[list[dict[str, torch.Tensor]]], what: str) -> torch.Tensor | None:
        """The tensor of all its pieces; CheckError where pipeline ranks hold different ones."""
        found: torch.Tensor | None = None
        for number, rank in enumerate(ranks):
            if name not in rank[0]:
                continue
            whole = self._assembled(name, ranks, number, what)
            if found is not None and not torch.equal(found, whole):
                raise CheckError(f"{what} must be equal on all pipeline ranks that hold it, got different values")
            found = whole
        return found

    def _assembled(self, name: str, ranks: list[list[dict[str, torch.Tensor]]], rank: int, what: str) -> torch.Tensor:
        """The tensor as pipeline rank `rank` holds it."""
        pieces = [one[name].detach() for one in ranks[rank]]
        return assemble(pieces, self.sources[name].shape, self.layouts[rank][name], self.meshes[rank], what)


def _flat(ranks: list[list[Any]]) -> list[Any]:
    return [one for row in ranks for one in row]

"""The parallel module of a pipeline rank: the user's model with the parameters of this rank's stages.

    model = parallelize_pipeline(model, captured, plan, device_mesh)
    loss = model.step(batch); optimizer.step(); optimizer.zero_grad()

It stays an instance of the user's class with the user's names. Parameters that the rank's stages read are DTensors on
the mesh of this pipeline rank; all others are absent, so that optimizers and distributed checkpoints see what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..plans.actions import TimedAction
from ..plans.errors import ReplayError, RequestError
from ..plans.layouts import Layout
from ..plans.plan import Plan
from .attributes import Modules, check_attributes
from .channels import Channels
from .graph import Captured, value_of
from .hooks import refuse_hooks
from .lookup import PlanLookup
from .microbatches import microbatches, splits, weights
from .peers import Peers, check_separable
from .placing import copied, held_by, local_of, of_first_rank, on_meta, placed_on, placements_of, put, tensors_of
from .rank_mesh import RankMesh, rank_mesh
from .recapture import Recapture
from .shared_gradients import sum_at_first
from .signature import Signature, check_held, signature_of, uncast
from .simulate import piece
from .stage_executor import Executor
from .stage_work import DRAWS, StageGraphs, StageWork, stage_graphs
from .stages import StageProgram, cut_stages
from .training_step import call_of, clip_by_norm, loss_of, refuse_whole
from .trees import Tree, flatten_call

__all__ = ["PipelineParallel", "parallelize_pipeline"]

LossFunction = Callable[[Any], torch.Tensor]


class PipelineParallel(nn.Module):
    """What `parallelize_pipeline` adds to the user's class. Not made directly."""

    _meshwright: _State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a rank of a pipeline holds a part of the model."""
        raise RequestError(
            "'model' must be called by model.step(batch) where its plan has a pipeline, got model(...): no rank holds "
            "all of it; use a plan without a pipeline to run the forward alone"
        )

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch, by all ranks together; the mean loss over its samples, on every rank.

        Takes the model's arguments, or one batch (a dict, tuple or list) that holds them. Gradients are added to those
        that are there. Raises StepError, which names rank and action, when a rank fails.
        """
        return self._meshwright.step(self, args, kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients down to a norm of at most `max_norm` over all ranks; the norm before."""
        state = self._meshwright
        at = state.at
        return clip_by_norm(self, max_norm, norm_type, counted=state.first_held, over=at.across, speaks=at.speaks)

    def timelines(self) -> tuple[tuple[TimedAction, ...], ...]:
        """When the actions of the last step ran, by pipeline rank, in seconds since its first began; called by all
        ranks. The clocks of hosts are taken as they are."""
        state = self._meshwright
        rows: list[Any] = [None] * dist.get_world_size(state.at.across)
        dist.all_gather_object(rows, state.timeline, group=state.at.across)
        rows = state.at.by_rank(rows)
        start = min((timed.start for row in rows for timed in row), default=0.0)
        return tuple(tuple(TimedAction(t.action, t.start - start, t.end - start) for t in row) for row in rows)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module, of DTensors; RequestError, which says what to call, where they are whole."""
        refuse_whole(self, state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @property
    def plan(self) -> Plan:
        """The plan that this model runs by."""
        return self._meshwright.plan


class _Program:
    """The stages of one capture, and this rank's part of them."""

    def __init__(self, captured: Captured, state: _State) -> None:
        plan, pipeline = state.plan, state.pipeline
        if len(captured.outputs) != 1 or not captured.tangents:
            raise RequestError("'loss' must be part of a program that runs as a pipeline; report this with the model")
        stages = cut_stages(captured, [stage.first for stage in pipeline.stages])
        self.stages: list[StageProgram] = stages
        self.loss = value_of(captured.outputs[0])  # type: ignore[arg-type]
        self.graded = {name for stage in stages for name in stage.captured.grads}
        self.names = captured.input_tree.names
        self.attributes = captured.attributes
        self.graphs: dict[int, StageGraphs] = {
            index: stage_graphs(stage, plan, state.at.coordinate, state.groups, state.device)
            for index, stage in enumerate(stages)
            if pipeline.stages[index].rank == state.rank
        }

    def holders(self, places: list[int]) -> dict[str, tuple[int, ...]]:
        """The pipeline ranks that hold each parameter and buffer."""
        found: dict[str, set[int]] = {}
        for stage, place in zip(self.stages, places, strict=True):
            for source in stage.captured.sources.values():
                if source.kind in ("parameter", "buffer"):
                    found.setdefault(source.name, set()).add(place)
        return {name: tuple(sorted(ranks)) for name, ranks in found.items()}

    def layouts(self) -> dict[str, Any]:
        """Where the sources of this rank's stages lie."""
        return {name: layout for graphs in self.graphs.values() for name, layout in graphs.layouts.items()}


class _State:
    """A pipeline rank's programs, one per signature of its micro-batches, and what joins it to the others."""

    def __init__(self, recapture: Recapture, at: RankMesh, timeout_s: float, peers: Peers | None) -> None:
        plan, self.peers = recapture.plan, peers
        assert plan.pipeline is not None
        self.recapture, self.plan, self.pipeline = recapture, plan, plan.pipeline
        self.at, self.rank, self.mesh = at, at.rank, at.mesh
        self.device_mesh, self.device = at.device_mesh, at.device
        self.groups = [at.device_mesh.get_group(axis).group_name for axis in range(self.mesh.ndim)]
        self.places = [stage.rank for stage in plan.pipeline.stages]
        self.channels = Channels(
            at.processes, self.rank, index=at.index, device=self.device, timeout_s=timeout_s,
            mixed=at.mixed, among_others=peers is not None,
        )  # fmt: skip
        self.executor = Executor(plan.pipeline.order, self.rank, self.channels)
        self.programs: dict[Signature, _Program] = {}
        self.modules = Modules()
        self.holders: dict[str, tuple[int, ...]] = {}
        self.sharing: dict[tuple[int, ...], Any] = {}
        self.first_held: list[str] = []
        self.timeline: list[TimedAction] = []

    def add(self, captured: Captured, signature: Signature) -> _Program:
        """Keep the program of a capture."""
        program = _Program(captured, self)
        if self.peers is not None:
            check_separable(captured, draws=True)
        if self.holders and program.holders(self.places) != self.holders:
            raise ReplayError(
                "'microbatches' must leave each stage its parameters, got a batch of a size at which the model reads "
                "them elsewhere; give one of another size"
            )
        self.programs[signature] = program
        return program

    def join(self, holders: dict[str, tuple[int, ...]]) -> None:
        """Note who holds what, and join the ranks that hold the same parameters."""
        self.holders = holders
        self.first_held = [name for name, ranks in holders.items() if ranks[0] == self.rank]
        for ranks in sorted({ranks for ranks in holders.values() if len(ranks) > 1}):
            if len({self.plan.sharding_of(rank) for rank in ranks}) == 1:
                self.sharing[ranks] = self.channels.group(ranks)

    def step(self, model: PipelineParallel, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """See `PipelineParallel.step`."""
        args, kwargs = call_of(args, kwargs, next(iter(self.programs.values())).names)
        tensors, tree = flatten_call(args, kwargs)
        count, seed = self.pipeline.microbatches, int(torch.randint(2**62, ()))
        peers, batch, of_batch = self.peers, 0, 1.0
        if peers is not None:
            tensors, batch = peers.cut(tensors, tree)
            of_batch = peers.rows(batch)[1] / batch
            # Draws go by the number of the micro-batch in the step.
            seed += DRAWS * sum(one.share for one in peers.plan.portions[: peers.index])
        parts = microbatches(tensors, tree, count)
        modules = self.modules.of(model)
        programs = [self._program(part, tree, modules) for part in parts]
        shares = [of_batch * share for share in weights(tensors, count)]
        works = {stage: self._work(stage, programs, model, tree.names, parts, shares) for stage in programs[0].graphs}
        with uncast():
            self.timeline = self.executor.run(works, seed)
        self._keep(programs[0], works, model, batch)
        self._keep_inputs(works, tree.names, tensors, parts)
        loss = self._loss(programs[0], works, shares)
        return loss if peers is None else peers.total(loss)

    def _program(self, part: Sequence[torch.Tensor], tree: Tree, modules: Mapping[str, nn.Module]) -> _Program:
        """The program for inputs of one micro-batch, captured first where their shapes are new."""
        key = Signature.of(tree, part, modules, self.device)
        known = self.programs.get(key)
        if known is None:
            args, kwargs = tree.build(part)
            first = next(iter(self.programs))
            known = self.recapture(args, kwargs, key, first, lambda captured: self.add(captured, key))
        check_attributes(modules, known.attributes)
        return known

    def _work(
        self,
        stage: int,
        programs: Sequence[_Program],
        model: nn.Module,
        names: tuple[str, ...],
        parts: Sequence[Sequence[torch.Tensor]],
        shares: Sequence[float],
    ) -> StageWork:
        graphs = [program.graphs[stage] for program in programs]
        sources = graphs[0].stage.captured.sources.values()
        taken = [s for s in sources if s.kind in ("parameter", "buffer")]
        held = {
            s.name: local_of(t).detach() for s, t in zip(taken, check_held(self.modules.of(model), taken), strict=True)
        }
        held |= {s.name: held_by(model, s.name) for s in sources if s.kind == "constant"}
        given = [
            {
                name: self._piece(tensor, one.layouts[name])
                for name, tensor in zip(names, part, strict=True)
                if name in one.layouts
            }
            for one, part in zip(graphs, parts, strict=True)
        ]
        return StageWork(graphs, held, given, shares)

    def _piece(self, tensor: torch.Tensor, layout: tuple[str, ...]) -> torch.Tensor:
        return piece(tensor.detach(), layout, self.mesh, self.at.coordinate).to(self.device)

    def _keep(self, program: _Program, works: dict[int, StageWork], model: nn.Module, batch: int) -> None:
        """Add up gradients, of shared parameters over all that hold them, and keep changed buffers."""
        totals: dict[str, torch.Tensor] = {}
        for work in works.values():
            for name, gradient in work.gradients.items():
                totals[name] = totals[name] + gradient if name in totals else gradient
        for name, ranks in self.holders.items():
            if len(ranks) > 1 and self.rank in ranks and name in program.graded:
                like = local_of(held_by(model, name))
                total = totals.get(name, torch.zeros_like(like)).contiguous()
                totals[name] = self._summed(name, total, ranks, held_by(model, name))
        layouts = {name: layout for work in works.values() for name, layout in work.graphs[0].layouts.items()}
        for name, gradient in totals.items():
            parameter = held_by(model, name)
            placed = self._placed(gradient, layouts[name], parameter)
            parameter.grad = placed if parameter.grad is None else parameter.grad + placed
        with torch.no_grad():
            for work in works.values():
                for name, value in work.changed().items():
                    local_of(held_by(model, name)).copy_(value)

    def _summed(self, name: str, total: torch.Tensor, ranks: tuple[int, ...], whole: torch.Tensor) -> torch.Tensor:
        """The gradient of a shared parameter summed over the ranks that hold it."""
        if ranks in self.sharing:
            dist.all_reduce(total, group=self.sharing[ranks])
            return total
        meshes, places = self.plan.meshes(), {}
        for rank in ranks:
            layout = PlanLookup(self.plan.on_rank(rank)).layout(name)
            assert layout is not None
            places[rank] = layout, meshes[rank]
        return sum_at_first(name, total, whole, places, self.channels, self.at.coordinate)

    def _keep_inputs(
        self,
        works: dict[int, StageWork],
        names: tuple[str, ...],
        tensors: Sequence[torch.Tensor],
        parts: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Gradients of inputs, on every rank as the inputs are."""
        for at, (name, tensor, split) in enumerate(zip(names, tensors, splits(tensors), strict=True)):
            if not tensor.requires_grad:
                continue
            found = [torch.zeros_like(part[at], device=self.device) for part in parts]
            for work in works.values():
                for (other, microbatch), gradient in work.inputs.items():
                    if other == name:
                        like = found[microbatch]
                        placed = self._placed(gradient, work.graphs[microbatch].layouts[name], like)
                        found[microbatch] += placed.full_tensor()
            whole = torch.cat(found) if split else torch.stack(found).sum(0)
            whole = whole if self.at.speaks else torch.zeros_like(whole)
            dist.all_reduce(whole, group=self.at.across)
            whole = whole.to(tensor.device)
            tensor.grad = whole if tensor.grad is None else tensor.grad + whole

    def _placed(self, local: torch.Tensor, layout: Layout, like: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.device_mesh, placements_of(layout), run_check=False, shape=like.shape, stride=like.stride()
        )

    def _loss(self, program: _Program, works: dict[int, StageWork], shares: Sequence[float]) -> torch.Tensor:
        """The mean over the samples, from the stage that makes it to all ranks."""
        mean = torch.zeros((), dtype=program.loss.dtype, device=self.device)
        for work in works.values() if self.at.speaks else ():
            for (_, microbatch), value in work.results.items():
                mean = mean + value * shares[microbatch]
        dist.all_reduce(mean, group=self.at.across)
        return mean


def parallelize_pipeline(
    model: nn.Module,
    captured: Captured,
    plan: Plan,
    device_mesh: DeviceMesh | None,
    *,
    loss: LossFunction | None = None,
    in_place: bool = False,
    sound: Callable[[Captured], None] | None = None,
    timeout_s: float = 600.0,
    peers: Peers | None = None,
) -> nn.Module:
    """`model` run by `plan`, which has a pipeline: this rank's part of it, a new module of the model's class or the
    same one with `in_place`.

    `captured` is the model on one micro-batch with its loss; `device_mesh` has the axis 'pipeline' and then those of
    the plan's mesh, or is None where ranks have different meshes (see `rank_mesh`). A rank that waits for another
    longer than `timeout_s` raises. Weights that are there are taken over, rank 0's on every rank; see
    `passes.runtime.parallelize`. With `peers` this is one replica of several, on its share of each batch.
    """
    if peers is not None:
        plan.one_mesh("one replica of several")
    refuse_hooks(model)
    at = rank_mesh(plan, device_mesh)
    again = Recapture(skeleton=on_meta(model), plan=plan, loss=loss or loss_of, again=captured.again, sound=sound)
    state = _State(again, at, timeout_s, peers)
    program = state.add(captured, signature_of(captured, model, state.device))
    state.join(program.holders(state.places))
    layouts = program.layouts()
    pieces: dict[int, Any] = {}
    for name, tensor in tensors_of(model, captured):
        values = of_first_rank(tensor.detach(), state.device)
        here = state.rank in state.holders.get(name, ())
        pieces[id(tensor)] = placed_on(tensor, values, layouts[name], state.device_mesh, at.mesh) if here else None
    return _typed(_with_pieces(model, pieces, in_place=in_place), state)


def _with_pieces(model: nn.Module, pieces: dict[int, Any], *, in_place: bool) -> nn.Module:
    if in_place:
        put(model, pieces)
        return model
    stand_ins = {key: torch.empty(0) for key, tensor in pieces.items() if tensor is None}
    parallel = copied(model, {**pieces, **stand_ins})
    put(parallel, {id(stand_in): None for stand_in in stand_ins.values()})
    return parallel


def _typed(parallel: nn.Module, state: _State) -> nn.Module:
    cls = type(parallel)
    parallel.__class__ = type(
        cls.__name__, (PipelineParallel, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
    object.__setattr__(parallel, "_meshwright", state)
    return parallel

"""The training state of one process: the running model and optimizer, or the pieces of one version of the state.

A version is the number of the epoch in which the state was brought to where it lies. Two agreements keep survivors
alike, and both hold because an all-reduce ends on no rank before every rank has entered it:

    gate     passed before any rank steps its optimizer. If one survivor passed it, all have their gradients: those
             that were cut off there step too. If none did, no parameter has changed: all do the step again.
    settle   passed when the pieces of a new version are complete. If one survivor passed it, all have the new version;
             if none did, all still have the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...passes.graph import Captured
from ...passes.holdings import Kind, Spread, holders_of, kinds_of, local_pieces, put_together, tensors_of
from ...passes.microbatches import first_rows, microbatch, samples_of
from ...passes.peers import Peers
from ...passes.pipeline_runtime import parallelize_pipeline
from ...passes.placing import on_meta
from ...passes.runtime import parallelize
from ...passes.training_step import loss_of
from ...plans.errors import RequestError
from ...plans.plan import Plan
from ...plans.uneven import Uneven
from ..apply import capture_for
from ..dynamic import check_layouts
from .survivors import Request

__all__ = ["Running", "State", "Training"]


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """The pieces that this process holds of version `version`, which lies by `plan` on `ranks`; `extra` is what goes
    with it besides tensors that are split."""

    version: int
    plan: Plan | Uneven
    ranks: tuple[int, ...]
    done: int
    kinds: tuple[Kind, ...]
    pieces: dict[str, torch.Tensor]
    extra: dict[str, Any]


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A model that trains; `own` is the plan of this process's replica."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    plan: Plan | Uneven
    own: Plan
    ranks: tuple[int, ...]
    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class Training:
    """What a process trains, whether it is running, taken apart, or not there yet."""

    request: Request
    optimizer_for: Callable[[nn.Module], torch.optim.Optimizer]
    scheduler_for: Callable[[torch.optim.Optimizer], Any] | None
    done: int = 0
    stage: str = "start"
    running: Running | None = None
    settled: State | None = None
    fresh: State | None = None
    # The last version that this process ran, its plan's file, and who played its ranks.
    known: tuple[int, bytes, tuple[int, ...]] | None = None
    _captured: dict[tuple[str, bool, int], Captured] = field(default_factory=dict)
    _skeleton: nn.Module | None = None
    _before: dict[str, Any] = field(default_factory=dict)

    # --- one step

    def begin(self) -> None:
        """Remember what a step changes before its gate: random state, buffers, what the forward writes."""
        assert self.running is not None
        state: Any = self.running.model
        # In a pipeline only buffers are written, when the step is over.
        programs = () if self.running.own.pipeline is not None else state._meshwright.programs.values()
        written = {name for program in programs for name in program.halves.program.mutations}
        tensors = {name: b for name, b in self.running.model.named_buffers()}
        tensors |= {name: p for name, p in self.running.model.named_parameters() if name in written}
        self._before = {
            "random": random_state(),
            "tensors": {name: _local(t).detach().clone() for name, t in tensors.items()},
        }
        self.stage = "step"

    def settle_step(self, done: int) -> None:
        """After a step that was broken off: finish it, when some rank did so (`done`), or take it back."""
        if self.running is None or self.stage in ("between", "start"):
            pass
        elif self.stage == "gate" and done == self.done + 1:
            self.stage = "finish"
            self.running.optimizer.step()
        elif self.stage in ("step", "gate"):
            held = dict((*self.running.model.named_buffers(), *self.running.model.named_parameters()))
            with torch.no_grad():
                for name, value in self._before["tensors"].items():
                    _local(held[name]).copy_(value)
            set_random_state(self._before["random"])
        if done != self.done:
            raise RuntimeError(f"this process did {self.done} steps, another one {done}: no common state")
        self.stage = "between"

    # --- taking apart and putting together

    def take_apart(self) -> None:
        """The running model becomes pieces."""
        if self.running is not None:
            self.settled = self.version_of(self.running, self.running.version)
            self.running = None

    def version_of(self, running: Running, version: int) -> State:
        """What `running` holds, as pieces; not copies."""
        return State(
            version=version,
            plan=running.plan,
            ranks=running.ranks,
            done=self.done,
            kinds=kinds_of(running.model, running.optimizer),
            pieces=local_pieces(running.model, running.optimizer),
            extra=self.extra(running),
        )

    def tensors(self) -> tuple[dict[str, torch.Tensor], tuple[Kind, ...]]:
        """The running state as a distributed checkpoint takes it."""
        assert self.running is not None
        model, optimizer = self.running.model, self.running.optimizer
        return tensors_of(model, optimizer), kinds_of(model, optimizer)

    @property
    def repeats(self) -> bool:
        """Whether this process is in another replica of unlike ones than the first, which holds the same values."""
        running = self.running
        assert running is not None
        return isinstance(running.plan, Uneven) and dist.get_rank() >= running.plan.portions[0].ranks

    def extra(self, running: Running) -> dict[str, Any]:
        """What goes with the tensors: settings of the optimizer and its scheduler, random state."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in running.optimizer.param_groups]
        scheduler = None if running.scheduler is None else running.scheduler.state_dict()
        return {
            "groups": groups,
            "scheduler": scheduler,
            "random": random_state(),
            "training": running.model.training,
        }

    def captured(self, plan: Plan, rows: int = 0) -> Captured:
        """The model as `plan` runs it, on the first `rows` samples (0: all), of one micro-batch where it has a
        pipeline."""
        request, pipeline = self.request, plan.pipeline
        call, loss = (request.args, request.kwargs), request.loss
        if rows:
            call = first_rows(*call, rows)
        if pipeline is not None:
            call, loss = microbatch(*call, pipeline.microbatches), loss or loss_of
        key = plan.options.recompute, pipeline is not None, samples_of(*call)
        if key not in self._captured:
            self._captured[key] = capture_for(plan, request.model, *call, loss, self._rules)
        return self._captured[key]

    def portions(self, plan: Plan | Uneven) -> list[tuple[Plan, Captured | None]]:
        """The plan of each replica and the model as it runs it; that is only looked at where a plan has a pipeline."""
        if not isinstance(plan, Uneven):
            return [(plan, None if plan.pipeline is None else self.captured(plan))]
        rows = plan.samples(samples_of(self.request.args, self.request.kwargs))
        return [
            (one.plan, None if one.plan.pipeline is None else self.captured(one.plan, max(count, 1)))
            for one, count in zip(plan.portions, rows, strict=True)
        ]

    def spread(self, plan: Plan | Uneven, ranks: tuple[int, ...]) -> Spread:
        """Where the state lies by `plan`, played by `ranks`."""
        rows = plan.split(ranks) if isinstance(plan, Uneven) else [ranks]
        return Spread(
            [
                (one, row, None if captured is None else holders_of(captured, one))
                for (one, captured), row in zip(self.portions(plan), rows, strict=True)
            ]
        )

    def kinds(self, plan: Plan | Uneven, said: Iterable[Iterable[Kind]]) -> tuple[Kind, ...]:
        """All tensors of the training state from what ranks hold; of a pipeline, whose ranks hold parts of the model,
        also those parameters and buffers that none of them holds."""
        found = {kind.name: kind for kinds in said for kind in kinds}
        captured = self.portions(plan)[0][1]
        if captured is not None:
            device = next((kind.device for kind in found.values()), "cpu")
            for name, kind in _sources(captured, device).items():
                found.setdefault(name, kind)
        return tuple(found.values())

    def build(
        self,
        plan: Plan | Uneven,
        ranks: tuple[int, ...],
        version: int,
        mesh: DeviceMesh,
        state: State | None,
        timeout_s: float,
    ) -> Running:
        """The model run by `plan`, with the values of `state`, or its own where nothing has been trained yet; `mesh` is
        that of this process's replica."""
        request, own, rows, peers = self.request, plan, 0, None
        if isinstance(plan, Uneven):
            at = plan.portion_of(dist.get_rank())
            own = plan.portions[at].plan
            rows = max(plan.samples(samples_of(request.args, request.kwargs))[at], 1)
        assert isinstance(own, Plan)
        captured = self.captured(own, rows)
        if isinstance(plan, Uneven):
            kinds = [kind for kind in _sources(captured, "cpu").values() if kind.name in captured.grads]
            peers = Peers(plan, kinds, [None if c is None else holders_of(c, one) for one, c in self.portions(plan)])
        if self._skeleton is None:
            self._skeleton = on_meta(request.model)
        source = request.model
        if state is not None:
            source = self._skeleton
            source.train(state.extra["training"])
        sound = partial(check_layouts, own, rules=self._rules)
        if own.pipeline is None:
            model = parallelize(source, captured, own, mesh, loss=request.loss, sound=sound, peers=peers)
        else:
            model = parallelize_pipeline(
                source, captured, own, mesh, loss=request.loss, sound=sound, timeout_s=timeout_s, peers=peers
            )
            mesh = mesh[(mesh.mesh_dim_names or ())[1:]]
        if state is None:
            optimizer = self.optimizer_for(model)
        else:
            optimizer = put_together(model, self.optimizer_for, state.kinds, state.pieces, mesh)
        scheduler = None if self.scheduler_for is None else self.scheduler_for(optimizer)
        if state is not None:
            _restore(optimizer, scheduler, state.extra)
        self.known = version, plan.to_bytes(), ranks
        return Running(
            model=model, optimizer=optimizer, scheduler=scheduler, plan=plan, own=own, ranks=ranks, version=version
        )

    def forget_weights(self) -> None:
        """A step was done: the weights that the model was given with are not needed any more."""
        if self._skeleton is not None and self.request.model is not self._skeleton:
            self.request = replace(self.request, model=self._skeleton)

    @property
    def _rules(self) -> Any:
        return self.request.options.get("rules", ())


def _sources(captured: Captured, device: str) -> dict[str, Kind]:
    """The parameters and buffers of a captured model."""
    return {
        source.name: Kind(
            name=source.name, shape=tuple(source.shape), like=source.name, device=device,
            dtype=str(source.dtype).removeprefix("torch."),
        )
        for source in captured.sources.values() if source.kind in ("parameter", "buffer")
    }  # fmt: skip


def _restore(optimizer: torch.optim.Optimizer, scheduler: Any, extra: dict[str, Any]) -> None:
    if len(optimizer.param_groups) != len(extra["groups"]):
        raise RequestError(
            f"'optimizer' must make as many groups of parameters each time, got {len(optimizer.param_groups)} after "
            f"{len(extra['groups'])}"
        )
    if scheduler is not None and extra["scheduler"] is not None:
        scheduler.load_state_dict(extra["scheduler"])
    for group, settings in zip(optimizer.param_groups, extra["groups"], strict=True):
        group.update(settings)


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's generators."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Set torch's generators to what `random_state` gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and dist.is_available() and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: Any = tensor
    return local.to_local() if hasattr(local, "to_local") else tensor

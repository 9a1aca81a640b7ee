"""The work of one stage on one rank: its graphs, and what it holds between its actions.

Whoever runs it (the executor on real ranks, the check on simulated ones) asks for the inputs of an action's graph, runs
the graph, and hands the results back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from ..plans.actions import Action
from ..plans.layouts import Layout, local_shape
from ..plans.marks import KEEP
from ..plans.meshes import Mesh
from ..plans.plan import Plan
from ..plans.steps import parse_step
from .collectives import Emitter
from .graph import values_of
from .handover import Part, given_parts, taken_parts, whole_part
from .keeping import kept_once
from .local import LocalProgram, gathering, localize, reduction
from .naming import draws_random
from .split import cut
from .stage_lookup import StageLookup
from .stages import StageProgram
from .weights import in_two_steps

__all__ = ["DRAWS", "Expected", "StageGraphs", "StageWork", "drawing", "stage_graphs"]

# What the seed of a micro-batch's draws grows by from one to the next.
DRAWS = 7_368_787


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A tensor that comes from another stage: its name, the shape (elements) of this rank's piece, its dtype, and the
    parts in which it comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageGraphs:
    """One stage as one rank runs it.

    graphs      by kind of action: UNSHARD, F, B, I, W and REDUCE_GRAD
    taken       positions of what the backward reads that W reads as well
    layouts     where each source lies
    receives, receives_gradient   the pieces that come from the neighbouring stages
    sends, sends_gradient         the parts in which each value goes to them
    """

    stage: StageProgram
    program: LocalProgram
    graphs: Mapping[str, fx.Graph]
    taken: tuple[int, ...]
    layouts: Mapping[str, Layout]
    receives: tuple[Expected, ...]
    receives_gradient: tuple[Expected, ...]
    sends: tuple[tuple[Part, ...], ...]
    sends_gradient: tuple[tuple[Part, ...], ...]


def stage_graphs(
    stage: StageProgram,
    plan: Plan,
    coordinate: tuple[int, ...],
    groups: Sequence[str],
    device: torch.device | None = None,
) -> StageGraphs:
    """What the rank at `coordinate` of the stage's mesh runs; `groups[a]` is the process group of mesh axis `a`.

    Gradients that end in a collective are added up over the micro-batches before it, once, unless the plan reduces them
    in each.
    """
    captured, lookup = stage.captured, StageLookup(plan, stage)
    mesh = lookup.whole.plan.mesh
    parameters = [s.name for s in captured.sources.values() if s.kind == "parameter" and s.name in captured.grads]
    once = plan.pipeline is None or plan.pipeline.reduce_gradients == "step"
    late = [name for name in parameters if once and _ends_in_collective(lookup, name)]
    passed = stage.sends_gradient
    several = plan.pipeline is not None and plan.pipeline.microbatches > 1
    kept = kept_once(captured, lookup) if several else ()
    program = localize(captured, lookup, mesh, coordinate, groups, device=device, late=late, passed=passed, once=kept)
    halves = cut(program, early=plan.options.prefetch)
    steps = in_two_steps(halves.backward, program.gradients, passed)
    last = reduction(captured, lookup, program, Emitter(fx.Graph(), mesh, coordinate, groups, device))
    first = gathering(captured, lookup, program, Emitter(fx.Graph(), mesh, coordinate, groups, device))
    graphs = {
        "UNSHARD": first,
        "F": halves.forward,
        "B": halves.backward,
        "I": steps.first,
        "W": steps.then,
        "REDUCE_GRAD": last,
    }
    layouts = {source.name: lookup(source.name).outputs[0] for source in captured.sources.values()}
    boundary = _Boundary(stage, plan, lookup, coordinate)
    return StageGraphs(
        stage=stage,
        program=program,
        graphs=graphs,
        taken=steps.taken,
        layouts={name: layout for name, layout in layouts.items() if layout is not None},
        receives=boundary.expected(stage.receives, stage.index - 1),
        receives_gradient=boundary.expected(stage.receives_gradient, stage.index + 1),
        sends=boundary.leaving(stage.sends, stage.captured.outputs, stage.index + 1),
        sends_gradient=boundary.leaving(
            stage.sends_gradient, [captured.grads[name] for name in stage.sends_gradient], stage.index - 1
        ),
    )


def _ends_in_collective(lookup: StageLookup, name: str) -> bool:
    return any(not parse_step(text).is_local for text in lookup(f"{name}::gradient").inputs[0].steps)


@contextlib.contextmanager
def drawing(graphs: StageGraphs, action: Action, seed: int) -> Iterator[None]:
    """What the forward draws at random depends on the step's seed, the stage and the micro-batch alone: not on the
    order of actions, and never is one stage's draw that of another."""
    if action.kind != "F" or not any(draws_random(n) for n in graphs.graphs["F"].nodes if n.op == "call_function"):
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((seed + 1_000_003 * action.stage + DRAWS * (action.microbatch or 0)) % 2**63)
        yield


class _Boundary:
    """What one rank is given by the neighbouring stages and gives them."""

    def __init__(self, stage: StageProgram, plan: Plan, lookup: StageLookup, coordinate: tuple[int, ...]) -> None:
        self.plan, self.lookup, self.coordinate = plan, lookup, coordinate
        self.mesh = lookup.whole.plan.mesh
        captured = stage.captured
        self.nodes = {captured.names[n]: n for n in (*captured.sources, *captured.tangents.values())}

    def expected(self, names: Sequence[str], other: int) -> tuple[Expected, ...]:
        """The values that come from stage `other`."""
        return tuple(self._one(name, other) for name in names)

    def _one(self, name: str, other: int) -> Expected:
        value, layout = values_of(self.nodes[name])[0], self.lookup(name).outputs[0]
        assert value is not None and layout is not None
        shape = local_shape(value.shape, layout, self.mesh.shape, self.coordinate)
        way = self.lookup.landing.get(name)
        if way is None:
            parts = whole_part(self.mesh, self.coordinate)
        else:
            start, end = (way.sent, self._mesh(other)), (way.landed, self.mesh)
            parts = taken_parts(value, start, end, self.coordinate)
        return Expected(name=name, shape=shape, dtype=value.dtype, parts=parts)

    def leaving(
        self, names: Sequence[str], nodes: Sequence[fx.Node | None], other: int
    ) -> tuple[tuple[Part, ...], ...]:
        """The parts of the values `names`, made by `nodes`, that go to stage `other`."""
        found: list[tuple[Part, ...]] = []
        for name, node in zip(names, nodes, strict=False):
            way = self.lookup.leaving.get(name)
            if way is None:
                found.append(whole_part(self.mesh, self.coordinate))
                continue
            assert node is not None
            value = values_of(node)[0]
            assert value is not None
            start, end = (way.sent, self.mesh), (way.landed, self._mesh(other))
            found.append(given_parts(value, start, end, self.coordinate))
        return tuple(found)

    def _mesh(self, stage: int) -> Mesh:
        assert self.plan.pipeline is not None
        return self.plan.meshes()[self.plan.pipeline.stages[stage].rank]


class StageWork:
    """One training step of one stage: its activations by micro-batch, its gradients as they add up.

    graphs    by micro-batch: those of another size have others
    held      this rank's pieces of the parameters, buffers and constants, by name
    batches   this rank's pieces of the inputs, by micro-batch and name
    weights   what the tangent of each micro-batch's loss is: what it counts for in the mean, so that gradients are
              those of the mean
    """

    def __init__(
        self,
        graphs: Sequence[StageGraphs],
        held: Mapping[str, torch.Tensor],
        batches: Sequence[Mapping[str, torch.Tensor]],
        weights: Sequence[float],
    ) -> None:
        self.graphs, self.batches, self.weights = graphs, batches, weights
        # Parameters, what becomes of their gradients, and what crosses to other stages are the same in all.
        self.program, self.stage = graphs[0].program, graphs[0].stage
        self.held = dict(held)
        self.results: dict[tuple[int, int], torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.inputs: dict[tuple[str, int], torch.Tensor] = {}
        self._saved: dict[int, list[torch.Tensor]] = {}
        self._between: dict[int, list[torch.Tensor]] = {}
        self._owned: set[str] = set()

    def at(self, action: Action) -> StageGraphs:
        """The graphs of the action's micro-batch."""
        return self.graphs[action.microbatch or 0]

    def give(self, action: Action, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of the action's graph; `received` is what the neighbouring stage made for it."""
        if action.kind == "UNSHARD":
            return [self.held[name.removesuffix(KEEP)] for name in self.program.once]
        if action.kind == "REDUCE_GRAD":
            return [self.gradients.pop(name) for name in self.program.late]
        assert action.microbatch is not None
        if action.kind == "F":
            given = {**self.held, **self.batches[action.microbatch]}
            given |= dict(zip(self.stage.receives, received, strict=True))
            return [given[name] for name in self.at(action).program.sources]
        if action.kind == "W":
            return self._between.pop(action.microbatch)
        given = [*self._saved.pop(action.microbatch), *self._tangents(action.microbatch, received)]
        if action.kind == "I":
            self._between[action.microbatch] = [given[at] for at in self.at(action).taken]
        return given

    def take(self, action: Action, results: Sequence[torch.Tensor], *, kept: bool = False) -> list[torch.Tensor]:
        """Keep what the graph gave; what goes on to the neighbouring stage. Where gradients were `kept` while the graph
        ran (see `passes.weights.keeping`), they are not among the results."""
        if action.kind == "UNSHARD":
            self.held |= dict(zip(self.program.once, results, strict=True))
            return []
        if action.kind == "REDUCE_GRAD":
            self.gradients |= dict(zip(self.program.late, results, strict=True))
            return []
        assert action.microbatch is not None
        if action.kind == "F":
            return self._forward(action, results)
        passed = set(self.stage.sends_gradient)
        names = self.given_by(action)
        names = [n for n in names if n in passed] if kept else names
        found = dict(zip(names, results, strict=False))
        if action.kind == "I":
            self._between[action.microbatch] += results[len(names) :]
        for name in names:
            if name not in passed:
                self.add(action, name, found[name])
        return [found[name] for name in self.stage.sends_gradient] if action.kind != "W" else []

    def given_by(self, action: Action) -> list[str]:
        """The gradients that the graph of a B, I or W gives, in its order."""
        passed, kind = set(self.stage.sends_gradient), action.kind
        return [n for n in self.at(action).program.gradients if kind == "B" or (n in passed) == (kind == "I")]

    def changed(self) -> dict[str, torch.Tensor]:
        """Buffers after the step that the forward changes."""
        return {name: self.held[name] for name in self.program.mutations if name in self.held}

    def _forward(self, action: Action, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        program, stage, microbatch = self.at(action).program, self.at(action).stage, action.microbatch
        assert microbatch is not None
        outputs = dict(zip(program.outputs, results, strict=False))
        count = len(outputs) + len(program.mutations)
        for name, value in zip(program.mutations, results[len(outputs) : count], strict=True):
            # Not in place: earlier micro-batches may still need the value that they read.
            self.held[name] = value
        self.results |= {(model, microbatch): outputs[at] for model, at in stage.results.items()}
        self._saved[microbatch] = list(results[count:])
        return [outputs[at] for at in range(len(stage.sends))]

    def _tangents(self, microbatch: int, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        stage = self.graphs[microbatch].stage
        given = dict(zip(stage.receives_gradient, received, strict=True))
        own = {at: model for model, at in stage.results.items()}
        found = []
        for index, node in stage.captured.tangents.items():
            if index in own:
                found.append(torch.full_like(self.results[own[index], microbatch], self.weights[microbatch]))
            else:
                found.append(given[stage.captured.names[node]])
        return found

    def add(self, action: Action, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient to those of the micro-batches before; that of an input is kept by itself."""
        if self.stage.captured.sources[self._node(name)].kind == "input":
            assert action.microbatch is not None
            self.inputs[name, action.microbatch] = gradient
        elif name not in self.gradients:
            self.gradients[name] = gradient
        elif name in self._owned:
            self.gradients[name].add_(gradient)
        else:
            # The first one may be part of what the graph still holds.
            self.gradients[name] = self.gradients[name] + gradient
            self._owned.add(name)

    def _node(self, name: str) -> fx.Node:
        return next(node for node, source in self.stage.captured.sources.items() if source.name == name)

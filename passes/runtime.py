"""The parallel module: the user's model, its parameters DTensors, its forward and backward the planned local program.

    model = parallelize(model, captured, plan, device_mesh)
    loss = model(batch); loss.backward(); optimizer.step()

It stays an instance of the user's class with the user's names, so that optimizers, gradient clipping and distributed
checkpoints see ordinary DTensor parameters. Plain tensors given to it are whole (the same on every rank) and so are
the tensors it returns; a DTensor is taken as it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..plans.errors import ReplayError
from ..plans.layouts import Layout
from ..plans.meshes import Mesh
from ..plans.plan import Plan
from ..plans.sizes import check_sizes
from . import _torch
from .attributes import Modules, check_attributes
from .graph import Captured
from .hooks import drop_call_hooks
from .local import localize
from .lookup import PlanLookup
from .peers import Peers, check_separable
from .placing import copied, held_by, local_of, of_first_rank, on_meta, placed_on, placements_of, put, tensors_of
from .recapture import Recapture
from .signature import Signature, check_held, signature_of, uncast
from .simulate import piece
from .split import Halves, split
from .training_step import call_of, clip_by_norm, loss_of, refuse_whole
from .trees import Tree, flatten_call

__all__ = ["Parallel", "Program", "parallelize"]

LossFunction = Callable[[Any], torch.Tensor]
# On CPUs Inductor would join kernels that share nothing, and so make copies long before they are read. Everywhere it
# would move what only leaves the graph to its end, and so keep what gradients of weights are made of until then, would
# keep buffers that nobody needs for others of their size to come, and would order kernels anew: by the sizes that this
# rank has, so that ranks of an uneven plan could call collectives in different orders, and as if what the backward is
# given were never freed. The order is the plan's.
_COMPILE: dict[str, Any] = {
    "cpp.max_horizontal_fusion_size": 1,
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "allow_buffer_reuse": False,
}


class Program:
    """One captured step as this rank runs it: forward and backward graphs and what goes in and out of them."""

    def __init__(self, captured: Captured, plan: Plan, device_mesh: DeviceMesh) -> None:
        mesh = plan.mesh
        coordinate = device_mesh.get_coordinate()
        assert coordinate is not None
        groups = [device_mesh.get_group(axis).group_name for axis in range(mesh.ndim)]
        self.lookup = PlanLookup(plan)
        self.mesh: Mesh = mesh
        self.coordinate = tuple(coordinate)
        self.device = torch.device(device_mesh.device_type)
        local = localize(captured, self.lookup, mesh, self.coordinate, groups, device=self.device)
        self.halves: Halves = split(local, early=plan.options.prefetch)
        self.inputs: Tree = captured.input_tree
        self.outputs: Tree = captured.output_tree
        self.count = len(captured.outputs)
        self.sources = list(captured.sources.values())
        self.held = [source for source in self.sources if source.kind != "input"]
        self.attributes = captured.attributes
        self.layouts: list[Layout] = [self.lookup(s.name).outputs[0] for s in self.sources]  # type: ignore[misc]
        self.backward = _torch.boxed(self.halves.backward)
        self.compiled: tuple[Callable, Callable] | None = None

    def run(
        self,
        held: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        *,
        compiled: bool,
        add: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
    ) -> list[Any]:
        """Outputs, then mutated values, from the local pieces of what is held and what is given. `add` makes of the
        pieces of this replica's gradients those of all replicas."""
        forward, backward = self._graphs(compiled)
        if add is not None:
            backward = self._added(backward, add)
        return list(_Step.apply(self.halves, forward, backward, *held, *given))  # type: ignore[arg-type]

    def _added(self, backward: Callable, add: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable:
        def run(given: list[Any]) -> list[Any]:
            return list(add(dict(zip(self.halves.program.gradients, backward(given), strict=True))).values())

        return run

    def _graphs(self, compiled: bool) -> tuple[Callable, Callable]:
        if not compiled:
            return self.halves.forward, self.backward
        if self.compiled is None:
            backward = torch.compile(_torch.stealing(self.halves.backward), options=_COMPILE)
            self.compiled = (torch.compile(self.halves.forward, options=_COMPILE), backward)
        return self.compiled

    def local(self, tensor: torch.Tensor, layout: Layout, device_mesh: DeviceMesh) -> torch.Tensor:
        """This rank's piece of an input."""
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != device_mesh:
                # `redistribute` would leave it on its own mesh without a word where the placements are the same.
                raise ReplayError(
                    f"'inputs' must lie on the mesh that the model runs on, {device_mesh}, got one on "
                    f"{tensor.device_mesh}; give it whole, or make it anew on this mesh"
                )
            return tensor.redistribute(device_mesh, placements_of(layout)).to_local()
        if all(p == "R" for p in layout):
            return tensor.to(self.device)
        return piece(tensor, layout, self.mesh, self.coordinate).to(self.device)


class _Step(torch.autograd.Function):
    """The local forward, with the local backward as its derivative.

    What the forward computed for the backward is handed over in a list that the backward empties, so that activations
    are freed one by one as it goes; autograd itself would keep all of them to its end.
    """

    @staticmethod
    def forward(ctx: Any, halves: Halves, forward: Callable, backward: Callable, *sources: torch.Tensor) -> tuple:
        with torch.no_grad(), uncast():
            results = forward(*sources)
        program = halves.program
        ends, saved = results[: halves.results], list(results[halves.results :])
        ctx.set_materialize_grads(False)
        ctx.halves, ctx.run, ctx.like = halves, backward, [(r.shape, r.dtype, r.device) for r in ends]
        outside = {id(t) for t in (*sources, *ends)}
        # What a buffer or input held before this step changes it is kept as a copy.
        for at, source in enumerate(halves.kept):
            if source is not None and program.sources[source] in program.mutations:
                saved[at] = saved[at].clone()
        ctx.save_for_backward(*[t if id(t) in outside else None for t in saved])
        ctx.own = [None if id(t) in outside else t for t in saved]
        flows = {at for at, index in enumerate(program.outputs) if index in program.tangents}
        ctx.mark_non_differentiable(*[r for at, r in enumerate(ends) if at not in flows])
        return tuple(ends)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple:
        if ctx.own is None:
            raise RuntimeError(
                "a planned step can run its backward once: what it saved was freed; call the model again"
            )
        program = ctx.halves.program
        reached = dict(zip(program.outputs, tangents, strict=False))
        like = dict(zip(program.outputs, ctx.like, strict=False))
        given = [a if a is not None else b for a, b in zip(ctx.saved_tensors, ctx.own, strict=True)]
        ctx.own = None
        for index in program.tangents:
            shape, dtype, device = like[index]
            tangent = reached[index]
            given.append(torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent.contiguous())
        with torch.no_grad(), uncast():
            gradients = ctx.run(given)
        found = dict(zip(program.gradients, gradients, strict=True))
        for name, needs in program.needs.items():
            if needs and all(reached[i] is None for i in needs):
                found[name] = None  # nothing flowed: as in eager, there is no gradient rather than a zero one
        return (None, None, None, *[found.get(name) for name in program.sources])


class Parallel(nn.Module):
    """What `parallelize` adds to the user's class. Not made directly."""

    _meshwright: _State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, computed by all ranks together."""
        return _call(self._meshwright, self, args, kwargs, torch.compiler.is_compiling())

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch, by all ranks together; the loss.

        Takes the model's arguments, or one batch (a dict, tuple or list) that holds them. Gradients are added to those
        that are there.
        """
        args, kwargs = call_of(args, kwargs, next(iter(self._meshwright.programs.values())).inputs.names)
        loss = loss_of(self(*args, **kwargs))
        loss.backward()
        return loss.detach()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients down to a norm of at most `max_norm` over all ranks; the norm before."""
        return clip_by_norm(self, max_norm, norm_type)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module, of DTensors; RequestError, which says what to call, where they are whole."""
        refuse_whole(self, state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @property
    def plan(self) -> Plan:
        """The plan that this model runs by."""
        return self._meshwright.plan


def _run(state: _State, model: Parallel, args: tuple, kwargs: dict[str, Any], compiled: bool) -> Any:
    return state.call(model, args, kwargs, compiled)


# The parallel model runs its own graphs: torch.compile compiles those and not the code around them.
_call: Callable[..., Any] = torch.compiler.disable(_run)


class _State:
    """A parallel model's programs, one per signature of its inputs."""

    def __init__(
        self,
        recapture: Recapture,
        device_mesh: DeviceMesh,
        peers: Peers | None,
    ) -> None:
        self.recapture, self.plan, self.device_mesh = recapture, recapture.plan, device_mesh
        self.peers = peers
        self.programs: dict[Signature, Program] = {}
        self.modules = Modules()
        self.device = torch.device(device_mesh.device_type)

    def add(self, captured: Captured, signature: Signature) -> Program:
        """Keep the program of a capture."""
        program = Program(captured, self.plan, self.device_mesh)
        if self.peers is not None:
            check_separable(captured)
        self.programs[signature] = program
        return program

    def call(self, model: Parallel, args: tuple, kwargs: dict[str, Any], compiled: bool) -> Any:
        """Run the program for these inputs, capturing them first when their shapes are new."""
        tensors, tree = flatten_call(args, kwargs)
        peers, batch = self.peers, 0
        if peers is not None:
            tensors, batch = peers.cut(tensors, tree)
            args, kwargs = tree.build(tensors)
        modules = self.modules.of(model)
        key = Signature.of(tree, tensors, modules, self.device)
        program = self.programs.get(key)
        if program is None:
            check_sizes(self.plan, {n: tuple(t.shape) for n, t in zip(tree.names, tensors, strict=True)})
            first = next(iter(self.programs))
            program = self.recapture(args, kwargs, key, first, lambda captured: self.add(captured, key))
        check_attributes(modules, program.attributes)
        held = [local_of(tensor) for tensor in check_held(modules, program.held)]
        layouts = [layout for s, layout in zip(program.sources, program.layouts, strict=True) if s.kind == "input"]
        given = [program.local(t, layout, self.device_mesh) for t, layout in zip(tensors, layouts, strict=True)]
        add = None if peers is None else partial(peers.sum, batch=batch)
        results = program.run(held, given, compiled=compiled, add=add)
        local = program.halves.program
        outputs = dict(zip(local.outputs, results, strict=False))
        with torch.no_grad():
            for name, value in zip(local.mutations, results[len(local.outputs) :], strict=True):
                target = tensors[tree.names.index(name)] if name in tree.names else local_of(held_by(model, name))
                target.copy_(value)
        made = [outputs.get(index) for index in range(program.count)]
        return program.outputs.build(made if peers is None else [peers.whole(one, batch) for one in made])


def parallelize(
    model: nn.Module,
    captured: Captured,
    plan: Plan,
    device_mesh: DeviceMesh,
    *,
    loss: LossFunction | None = None,
    in_place: bool = False,
    sound: Callable[[Captured], None] | None = None,
    peers: Peers | None = None,
) -> nn.Module:
    """`model` run by `plan` on `device_mesh`: a new module of the model's class, or the same one with `in_place`.

    Weights that are there (not on the meta device) are taken over, rank 0's on every rank: each keeps its own pieces.
    Otherwise call `to_empty(device=...)` and initialise, or load a distributed checkpoint. Inputs of other sizes are
    captured when they first come; `sound` raises when the plan's layouts do not hold for that capture. With `peers`
    this is one replica of several, on its share of each batch.
    """
    _fits_mesh(plan, device_mesh)
    again = Recapture(skeleton=on_meta(model), plan=plan, loss=loss, again=captured.again, sound=sound)
    state = _State(again, device_mesh, peers)
    program = state.add(captured, signature_of(captured, model, state.device))
    placed = {s.name: layout for s, layout in zip(program.sources, program.layouts, strict=True)}
    pieces: dict[int, Any] = {}
    for name, tensor in tensors_of(model, captured):
        if name in placed:
            values = of_first_rank(tensor.detach(), program.device)
            pieces[id(tensor)] = placed_on(tensor, values, placed[name], device_mesh, plan.mesh)
    if in_place:
        put(model, pieces)
        parallel = model
    else:
        parallel = copied(model, pieces)
    cls = type(parallel)
    parallel.__class__ = type(
        cls.__name__, (Parallel, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
    object.__setattr__(parallel, "_meshwright", state)
    drop_call_hooks(parallel)
    return parallel


def _fits_mesh(plan: Plan, device_mesh: DeviceMesh) -> None:
    shape = tuple(device_mesh.mesh.shape)
    if shape != plan.mesh.shape:
        raise ReplayError(
            f"'device_mesh' must have the plan's mesh shape {plan.mesh}, got {'x'.join(map(str, shape))}; plan "
            "again for this mesh"
        )

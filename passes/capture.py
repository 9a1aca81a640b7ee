"""Capture: a model and example inputs become one joint forward and backward graph with stable names.

The model is copied with fake parameters (no weights are read or made), run once under fake CPU tensors, and traced
with its backward by AOTAutograd. Tracing the eager run itself keeps what an export in between loses: the backward of
a custom autograd.Function, recomputation of checkpointed regions, no-grad regions, tied parameters, tensor hooks.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..plans.errors import CaptureError, MeshwrightError
from . import _torch
from .attributes import Attribute, reading
from .canonical import DECOMPOSED, canonicalize
from .decompositions import DECOMPOSITIONS
from .graph import Captured, Source, SourceKind, argument
from .keeping import insert_keeps
from .known import Branches, Knowing, guarded
from .naming import block_name, name_nodes
from .operators import as_plain_ops
from .recompute import Recompute
from .recompute import recompute as repeat
from .regions import Region, attach_regions, kept_regions
from .trees import Tree, flatten_call, flatten_output

__all__ = ["Trace", "capture"]

# Frames of these folders are not the user's.
_INTERNAL = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    recompute: Recompute = "none",
    again: Collection[str] | None = None,
) -> Captured:
    """The joint graph of one training step of `model` on inputs like `args` and `kwargs`.

    Tensors in `args` and `kwargs` may be real, fake or on the meta device: only shapes, dtypes and requires_grad count,
    unless the model reads values (known.py): real ones then decide, and are looked at again at every step.
    `loss` maps the model's output to a scalar and becomes part of the graph; `recompute` says what the backward
    computes again instead of reading what the forward saved (passes/recompute.py); `again` names what
    that is where it was decided at other sizes. Raises CaptureError, which names
    the module and source line, when the model cannot be traced without changing what it computes.
    """
    return Trace.of(model, args, kwargs, loss=loss).repeated(recompute, again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A step in which nothing is computed again yet, from which captures with any recomputation are made."""

    captured: Captured
    regions: tuple[Region, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> Trace:
        """The joint graph of `model`; arguments and errors as for `capture`."""
        if "_meshwright" in vars(model):
            raise CaptureError(
                "'model' must be a plain one, got one that runs by a plan already; use the model that was given to "
                "apply, or build it anew"
            )
        with kept_regions() as regions:
            captured = _traced(model, tuple(args), dict(kwargs or {}), loss)
            try:
                canonicalize(captured)
            except RuntimeError as error:
                # What an op does not take is told by fake tensors only where it is written in other ops.
                raise CaptureError(f"'model' must run on these inputs, got {type(error).__name__}: {error}") from error
            name_nodes(captured)
        attach_regions(captured.graph, regions)
        return cls(captured=captured, regions=tuple(regions))

    def repeated(self, mode: Recompute, again: Collection[str] | None = None) -> Captured:
        """A copy whose backward computes again what `mode` says, or the nodes named `again`."""
        captured = self.captured.copied()
        if mode != "none":
            with kept_regions(self.regions):
                repeat(captured, mode, lambda node: block_name(captured.names.get(node, "")), again)
                name_nodes(captured)
            attach_regions(captured.graph, self.regions)
        insert_keeps(captured)
        return captured


def _traced(model: nn.Module, args: tuple, kwargs: dict, loss: Callable | None) -> Captured:
    """The graph as it was traced, by the first way that works.

    Library code is told that it is being traced, so that it takes its data-independent paths; then branches on values
    of the example may become guards; at last library code runs as it does in eager mode.
    """
    failed: CaptureError | None = None
    for told, branching in ((True, False), (True, True), (False, True)):
        entry = _Entry.of(model, args, kwargs, loss, branching=branching)
        try:
            with _explained(entry), _watched(entry), _tracing(told=told):
                joint = _torch.joint_graph(entry, entry.example, _torch.decompositions(DECOMPOSED) | DECOMPOSITIONS)
            return _read(joint, entry)
        except CaptureError as error:
            if failed is None or isinstance(error.__cause__, _torch.data_dependent_errors):
                failed = error
    assert failed is not None
    raise failed


class _Entry(nn.Module):
    """The model as a function of one flat list: parameters, buffers, constants, then inputs.

    With `branching` it may branch on values of the example.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Source] = []
        self.example: list[torch.Tensor] = []
        self.aliases: dict[str, str] = {}
        self.slots: list[tuple[SourceKind, str, int]] = []  # where the model holds its tensors, and their places here
        self.inputs: Tree | None = None
        self.outputs: Tree | None = None
        self.path: list[str] = []
        self.attributes: tuple[Attribute, ...] = ()
        self.loss: Callable[[Any], torch.Tensor] | None = None
        self.known = Knowing()
        self.branching = False
        self.model: nn.Module

    @classmethod
    def of(cls, model: nn.Module, args: tuple, kwargs: dict, loss: Callable | None, *, branching: bool) -> _Entry:
        self = cls()
        self.branching = branching
        mode = self.known
        memo: dict[int, Any] = {}
        places: dict[int, int] = {}
        for kind, name, tensor in _tensors(model):
            if id(tensor) in places:
                self.aliases[name] = self.sources[places[id(tensor)]].name
            else:
                places[id(tensor)] = len(self.sources)
                memo[id(tensor)] = _fake(tensor, mode)
                self._add(kind, name, tensor, memo[id(tensor)])
            self.slots.append((kind, name, places[id(tensor)]))
        tensors, self.inputs = flatten_call(args, kwargs)
        for name, tensor in zip(self.inputs.names, tensors, strict=True):
            self._add("input", name, tensor, _fake(tensor, mode))
        try:
            object.__setattr__(self, "model", copy.deepcopy(model, memo))
        except Exception as error:
            raise CaptureError(
                f"'model' must be deep-copyable, got {type(error).__name__}: {error}; "
                "give it a __deepcopy__ or build it anew"
            ) from error
        self.loss = loss
        return self

    def _add(self, kind: SourceKind, name: str, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        self.sources.append(
            Source(
                kind=kind,
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
            )
        )
        self.example.append(fake)
        self.known.give(fake, tensor, inputs=kind == "input")

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.inputs is not None
        given = [t for s, t in zip(self.sources, flat, strict=True) if s.kind == "input"]
        args, kwargs = self.inputs.build(given)
        self.path.clear()
        _torch.keep_saved_tensor_hooks()
        self._install(flat)
        branches = Branches(self.known, _internal)
        with branches if self.branching else contextlib.nullcontext(), reading(self.model) as reads:
            out = self.model(*args, **kwargs)
            if self.loss is not None:
                out = self.loss(out)
        reads.refuse_kept(flat)
        self.attributes = reads.attributes()
        self._keep_reassigned(flat)
        tensors, tree = flatten_output(out)
        self.outputs = guarded(tree, branches.guards)
        # What is given is a copy: outputs may be views of each other or of an input (a plain clone leaves the graph).
        return (*(tensor.clone() for tensor in tensors), *branches.conditions)

    def _install(self, flat: Sequence[torch.Tensor]) -> None:
        """Put the traced tensors into the model. They stay there for what the backward computes again."""
        for kind, name, place in self.slots:
            held, key = self._holder(kind, name)
            held[key] = flat[place]

    def _keep_reassigned(self, flat: Sequence[torch.Tensor]) -> None:
        """A buffer that the model has replaced by another tensor is a mutated one."""
        for kind, name, place in self.slots:
            held, key = self._holder(kind, name)
            before, now = flat[place], held.get(key)
            if kind != "buffer" or now is before or not isinstance(now, torch.Tensor):
                continue
            if (now.shape, now.dtype) != (before.shape, before.dtype):
                raise CaptureError(
                    f"'model' must keep shape and dtype of its buffers, got {tuple(now.shape)} and {now.dtype} for "
                    f"{name} of {tuple(before.shape)} and {before.dtype}"
                )
            with torch.no_grad():
                before.copy_(now)

    def _holder(self, kind: SourceKind, name: str) -> tuple[dict[str, Any], str]:
        """The dict in which a module of the model holds the tensor `name`, and its key there."""
        path, _, key = name.rpartition(".")
        module = self.model.get_submodule(path)
        held: dict[str, Any] = vars(module)
        if kind != "constant":
            held = module._parameters if kind == "parameter" else module._buffers  # type: ignore[assignment]
        return held, key


def _tensors(model: nn.Module) -> Iterator[tuple[SourceKind, str, torch.Tensor]]:
    for name, tensor in model.named_parameters(remove_duplicate=False):
        yield "parameter", name, tensor
    for name, tensor in model.named_buffers(remove_duplicate=False):
        yield "buffer", name, tensor
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield "constant", f"{path}.{key}".lstrip("."), value


def _fake(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """A fake CPU tensor like `tensor`; a parameter stays a parameter."""
    with mode:
        if tensor.layout == torch.strided:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        else:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def _tracing(*, told: bool) -> Iterator[None]:
    """What holds while tracing: library code is `told` of it, a checkpointed region is repeated whole, and the random
    state of the process is left alone."""
    before = _other_draws()
    with (
        _torch.exporting() if told else contextlib.nullcontext(),
        _autocast_seen(),
        as_plain_ops(),
        set_checkpoint_early_stop(False),
        torch.random.fork_rng(devices=[]),
    ):
        yield
    drawn = [
        name for name, was, now in zip(("random", "numpy.random"), before, _other_draws(), strict=True) if was != now
    ]
    if drawn:
        raise CaptureError(
            f"'model' must draw random numbers by torch alone, got draws of {' and '.join(drawn)}, which every step of "
            "the planned program would repeat; switch them off in the model's configuration, or draw outside of it"
        )


@contextmanager
def _autocast_seen() -> Iterator[None]:
    """Refuse autocast for a device of which fake CPU tensors take no note: the program would go without its casts."""

    def switch(kind: Any, *enabled: bool) -> None:
        device, on = (kind, enabled[0]) if enabled else ("cuda", kind)
        if on and device != "cpu":
            raise CaptureError(
                f"'model' must not be captured under torch.autocast on {device}, got it around the call or in forward; "
                'use torch.autocast("cpu", dtype) where the model is planned and called, which the program then has '
                "on every device, or convert the model"
            )
        before(kind, *enabled)

    before = torch.set_autocast_enabled
    if torch.is_autocast_enabled("cuda"):
        switch("cuda", True)
    torch.set_autocast_enabled = switch
    try:
        yield
    finally:
        torch.set_autocast_enabled = before


def _other_draws() -> tuple[Any, Any]:
    """The states of the generators that a trace cannot see."""
    numpy = sys.modules.get("numpy")
    state: Any = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), None if state is None else (state[1].tobytes(), state[2])


@contextmanager
def _watched(entry: _Entry) -> Iterator[None]:
    """Label traced nodes with the module they come from, and remember where tracing stands for error messages."""
    handles, path = [], entry.path

    def enter(name: str) -> Callable:
        def hook(module: nn.Module, inputs: Any) -> None:
            path.append(name)
            _torch.module_scope(path)

        return hook

    def leave(name: str) -> Callable:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            while path and path.pop() != name:  # modules that raised, and the model went on
                pass
            _torch.module_scope(path)

        return hook

    for name, module in entry.model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _explained(entry: _Entry) -> Iterator[None]:
    """Turn whatever tracing raises into a CaptureError with module, source line and way out."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, entry.path)) from error


def _explain(error: Exception, path: list[str]) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _internal(f.filename)]
    line = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    module = next((name for name in reversed(path) if name), "") or "the root module"
    where = f"in {module}{line}"
    text = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    if isinstance(error, _torch.data_dependent_errors):
        return (
            "'model' must not read values of tensors while it runs, "
            f"got the data-dependent {text or type(error).__name__} {where}; give the result a fixed shape "
            "(a capacity, a mask, torch.where) or keep the region out of the captured model"
        )
    return f"'model' must be traceable, got {type(error).__name__}: {text} {where}"


def _internal(filename: str) -> bool:
    return filename.startswith(("<", *_INTERNAL))


def _read(joint: fx.GraphModule, entry: _Entry) -> Captured:
    """Read placeholders and outputs of the joint graph by their descriptors."""
    assert entry.outputs is not None and entry.inputs is not None
    outputs, grads, mutations = _read_outputs(joint.graph, entry)
    sources, tangents = _read_inputs(joint.graph, entry)
    return Captured(
        module=joint,
        sources=sources,
        tangents=tangents,
        outputs=outputs,
        grads=grads,
        mutations=mutations,
        aliases=entry.aliases,
        input_tree=entry.inputs,
        output_tree=entry.outputs,
        order=tuple(s.name for s in entry.sources),
        names={},
        backward=set(),
        attributes=entry.attributes,
    )


def _read_inputs(graph: fx.Graph, entry: _Entry) -> tuple[dict[fx.Node, Source], dict[int, fx.Node]]:
    sources: dict[fx.Node, Source] = {}
    tangents: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if type(desc) is _torch.PlainAOTInput:
            sources[node] = entry.sources[desc.idx]
        elif type(desc) is _torch.TangentAOTInput and type(desc.output) is _torch.PlainAOTOutput:
            tangents[desc.output.idx] = node
        elif "Token" not in type(desc).__name__:
            raise CaptureError(
                f"'model' must not need {type(desc).__name__} in its joint graph ({desc}); report it with the model"
            )
    return sources, tangents


def _read_outputs(
    graph: fx.Graph, entry: _Entry
) -> tuple[list[fx.Node | None], dict[str, fx.Node], dict[str, fx.Node]]:
    assert entry.outputs is not None
    outputs: list[fx.Node | None] = [None] * len(entry.outputs.names)
    grads: dict[str, fx.Node] = {}
    mutations: dict[str, fx.Node] = {}
    result = next(iter(graph.find_nodes(op="output")))
    for node, desc in zip(argument(result, 0), result.meta["desc"], strict=True):
        kind = type(desc)
        if kind is _torch.PlainAOTOutput:
            outputs[desc.idx] = node
        elif kind is _torch.InputMutationAOTOutput:
            source = entry.sources[desc.mutated_input.idx]
            _refuse_mutated_parameter(source)
            mutations[source.name] = node
        elif kind is _torch.GradAOTOutput:
            if node is not None:
                name = entry.sources[desc.grad_of.idx].name
                _refuse_sparse_gradient(node, name)
                grads[name] = node
        elif "Token" in kind.__name__:
            raise CaptureError(
                "'model' must not use ops with side effects, such as prints of values; keep them outside of the model"
            )
        elif desc is not None:
            raise CaptureError(
                f"'model' must not return {kind.__name__} ({desc}); "
                "return a copy of the tensor instead of a view of an input"
            )
    return outputs, grads, mutations


def _refuse_sparse_gradient(node: fx.Node, name: str) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        raise CaptureError(
            f"'model' must have dense gradients, got a {str(value.layout).removeprefix('torch.')} one of {name}; make "
            "the embedding that reads it with sparse=False"
        )


def _refuse_mutated_parameter(source: Source) -> None:
    if source.kind == "parameter" or source.requires_grad:
        raise CaptureError(
            f"'model' must not mutate a parameter while it runs, got a mutated {source.name}; "
            "make it a buffer, or update it outside of forward"
        )

"""What one rank's step allocates, byte for byte: its local program walked on tensors without data.

Every storage is followed from the op that makes it to the moment at which nothing holds it, in the order in which the
rank runs (passes/split.py, passes/prefetch.py), as an allocator that hands out multiples of `rounds_to` counts it:
temporaries inside of ops, copies that pack and pad, buffers of collectives until they are waited for. What the runtime
holds beside the graphs (passes/runtime.py) is held here: sources and outputs to the end of the step, gradients from
their making on. The optimizer is not part of it. Of a compiled program, what is written and when is told from the ops
that the walk met (passes/fused.py).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ..plans.layouts import local_shape
from ..plans.meshes import Mesh
from . import _torch
from .attention import attention_backward
from .fused import Op, kernels
from .graph import Captured, values_of
from .local import LocalProgram, Lookup, localize
from .split import cut

__all__ = ["PARTS", "Footprint", "Moment", "footprint"]

PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "communication", "other")
_PART = {name: index for index, name in enumerate(PARTS)}
# What the nodes that one rank's program has for an edge or an op make (see `Emitter.origin`).
_MADE = {"op": "activations", "pick": "activations", "gather": "gathered", "move": "communication"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One node of the program: the captured node that it is for, whether it is an op of its own and not a move, and
    bytes by part (as in PARTS): at the fullest moment within it and after it."""

    origin: str
    op: bool
    peak: np.ndarray
    after: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The moments of a rank's forward and of its backward, and the bytes of each of its sources, by name; `parameters`
    and `gradients` name the sources that are parameters and those that get a gradient. `kept`, `saved` and `left` say
    what is held at the end of the forward, at the start of the backward and at its end: bytes by part, by the captured
    node that they are for."""

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    kept: Mapping[str, np.ndarray]
    saved: Mapping[str, np.ndarray]
    left: Mapping[str, np.ndarray]
    sources: dict[str, int]
    parameters: frozenset[str]
    gradients: frozenset[str]


def footprint(
    captured: Captured,
    lookup: Lookup,
    mesh: Mesh,
    coordinate: tuple[int, ...],
    *,
    early: bool,
    device: torch.device,
    rounds_to: int,
    once: Sequence[str] = (),
    compiled: bool = False,
) -> Footprint:
    """Walk the program of the rank at `coordinate`; `early`, `device` and `once` as for `split` and `localize`,
    `compiled` says whether it runs so."""
    program = localize(captured, lookup, mesh, coordinate, ["walked"] * mesh.ndim, device=device, once=once)
    named = {name: node for node, name in captured.names.items()}
    with _torch.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        storages = _Storages(rounds_to)
        given = []
        for name in program.sources:
            layout, value = lookup(name).outputs[0], values_of(named[name])[0]
            assert layout is not None and value is not None
            shape = local_shape(tuple(value.shape), layout, mesh.shape, coordinate)
            given.append(torch.empty(shape, dtype=value.dtype))
        constants = {
            name: fake.from_tensor(value) if isinstance(value, torch.Tensor) and not _fake(value) else value
            for name, value in program.constants.items()
        }

        def made(name: str) -> list[torch.Tensor]:
            """What the op `name` gives on this rank, where that cannot be told from what it reads."""
            pairs = zip(values_of(named[name]), lookup(name).outputs, strict=True)
            held = [(v, local_shape(v.shape, o, mesh.shape, coordinate)) for v, o in pairs if v is not None and o]
            return [torch.empty(shape, dtype=value.dtype) for value, shape in held]

        def piece_of(tangent: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
            value, layout = tangent.meta["val"], lookup(captured.names[tangent]).outputs[0]
            assert layout is not None
            return local_shape(tuple(value.shape), layout, mesh.shape, coordinate), value.dtype

        with storages, torch.no_grad():
            run = _Run(storages, constants, made, compiled=compiled, together=device.type == "cpu")
            flowing = [piece_of(captured.tangents[index]) for index in program.tangents]
            return _walk(program, captured, given, flowing, constants, run, early=early)


def _fake(value: Any) -> bool:
    return isinstance(value, _torch.FakeTensor)


def _walk(
    program: LocalProgram,
    captured: Captured,
    given: list[torch.Tensor],
    flowing: Sequence[tuple[tuple[int, ...], torch.dtype]],
    constants: dict[str, Any],
    run: _Run,
    *,
    early: bool,
) -> Footprint:
    parts, storages = cut(program, early=early), run.storages
    kinds = {s.name: s.kind for s in captured.sources.values()}
    label = {"parameter": "parameters", "kept": "gathered"}
    sources: dict[str, int] = {}
    for name, tensor in zip(program.sources, given, strict=True):
        before = storages.total
        storages.see(tensor, label.get(kinds.get(name, "kept"), "other"))
        sources[name] = storages.total - before
    for value in constants.values():
        if isinstance(value, torch.Tensor):
            storages.see(value, "other")
    results, forward = run(parts.forward, list(given))
    kept = storages.held()
    tangents = [torch.empty(shape, dtype=dtype) for shape, dtype in flowing]
    for tangent in tangents:
        storages.label(tangent, "other")
    saved = [*results[len(program.outputs) + len(program.mutations) :], *tangents]
    # Who called the forward holds what it gave until the step is over.
    outputs = results[: len(program.outputs)]
    del results
    start = storages.held()
    gradients, backward = run(parts.backward, saved, names=program.gradients)
    left = storages.held()
    del gradients, outputs
    return Footprint(
        forward=tuple(forward),
        backward=tuple(backward),
        kept=kept,
        saved=start,
        left=left,
        sources=sources,
        parameters=frozenset(name for name in sources if kinds.get(name) == "parameter"),
        gradients=frozenset(program.gradients),
    )


class _Storages(_torch.TorchDispatchMode):
    """The storages alive, their bytes by part: `now`, and as they were when their total was largest since `begin`."""

    def __init__(self, rounds_to: int) -> None:
        super().__init__()
        self.rounds_to = rounds_to
        self.alive: dict[int, tuple[int, int]] = {}
        self.origins: dict[int, str] = {}
        self.record: _Record | None = None
        self.now = [0] * len(PARTS)
        self.most, self.total, self.largest = list(self.now), 0, 0

    def begin(self) -> None:
        """From here on the largest total is looked for anew."""
        self.most, self.largest = list(self.now), self.total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [tensor for tensor in _tensors(found) if self.see(tensor, "other")]
        if self.record is not None:
            self.record.op(func, args, made)
        return found

    def see(self, tensor: torch.Tensor, part: str) -> bool:
        """Count the storage of `tensor` if it is new; whether it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return False
        size = -(-storage.nbytes() // self.rounds_to) * self.rounds_to
        self._add(key, size, _PART[part])
        weakref.finalize(storage, self._gone, key)
        return True

    def label(self, tensor: torch.Tensor, part: str) -> None:
        """Count the storage of `tensor` among `part` if it is an op's own."""
        key = tensor.untyped_storage()._cdata
        size, known = self.alive[key]
        if PARTS[known] not in ("parameters", "gradients"):
            self.now[known] -= size
            self.now[_PART[part]] += size
            self.alive[key] = (size, _PART[part])
            if self.record is not None:
                self.record.parts[self.record.numbers[key]] = _PART[part]

    def held(self) -> dict[str, np.ndarray]:
        """Bytes by part of what is alive, by the captured node that it is for."""
        found: dict[str, np.ndarray] = {}
        for key, name in self.origins.items():
            size, part = self.alive[key]
            found.setdefault(name, np.zeros(len(PARTS), dtype=np.int64))[part] += size
        return found

    def beside(self, size: int) -> None:
        """Count `size` bytes that are there for a moment beside all that is alive."""
        if self.record is not None:
            self.record.beside[self.record.node] = size
        if self.total + size > self.largest:
            self.largest, self.most = self.total + size, list(self.now)
            self.most[_PART["other"]] += size

    def _add(self, key: int, size: int, part: int) -> None:
        self.alive[key] = (size, part)
        if self.record is not None:
            self.record.value(key, size, part)
        self.now[part] += size
        self.total += size
        if self.total > self.largest:
            self.largest, self.most = self.total, list(self.now)

    def _gone(self, key: int) -> None:
        size, part = self.alive.pop(key)
        self.origins.pop(key, None)
        self.now[part] -= size
        self.total -= size


class _Record:
    """The ops of a half as they ran, for what its compiled form writes: values are storages, by number."""

    def __init__(self, storages: _Storages) -> None:
        self.start = list(storages.now)
        self.numbers: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.parts: dict[int, int] = {}
        self.ops: list[Op] = []
        self.beside: dict[int, int] = {}
        self.node = 0
        # What a collective is and reads, while its result is made.
        self.collective: tuple[str, torch.Tensor] | None = None
        for key, (size, part) in storages.alive.items():
            self.value(key, size, part)
        self.given = set(self.sizes)

    def value(self, key: int, size: int, part: int) -> None:
        """A new storage."""
        number = len(self.sizes)
        self.numbers[key], self.sizes[number], self.parts[number] = number, size, part

    def op(self, func: Any, args: Sequence[Any], made: Sequence[torch.Tensor]) -> None:
        """An op that ran."""
        name, tagged = func.overloadpacket.__name__, torch.Tag.pointwise in func.tags
        if self.collective is not None:
            name, args, tagged = self.collective[0], self.collective[1:], False
        read = list(_leaves(args))
        self.ops.append(
            Op(
                node=self.node,
                name=name,
                tagged=tagged,
                reads=self._of(read),
                made=self._of(made),
                read_size=max((t.numel() for t in read), default=0),
                made_size=max((t.numel() for t in made), default=0),
                columns=_leaves_last(args),
            )
        )

    def waits(self, tensors: Sequence[torch.Tensor]) -> None:
        """The first of `tensors`, a collective's result, is there now, and the others are no longer read for it."""
        self.ops.append(
            Op(node=self.node, name="wait", tagged=False, reads=self._of(tensors), made=(), read_size=0, made_size=0)
        )

    def _of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        keys = dict.fromkeys(t.untyped_storage()._cdata for t in tensors)
        return tuple(self.numbers[key] for key in keys if key in self.numbers)

    def moments(self, walked: Sequence[Moment], alive: set[int], together: bool) -> list[Moment]:
        """The moments of the half if it is compiled; `alive` are the storages that are there after it, `together` as
        for `kernels`."""
        ends = {self.numbers[key] for key in alive}
        now, found, runs = (
            np.array(self.start),
            [],
            iter(kernels(self.ops, self.given, ends, self.sizes, together=together)),
        )
        never = self.given - ends - {value for op in self.ops for value in op.reads}
        for value in never:
            now[self.parts[value]] -= self.sizes[value]
        kernel = next(runs, None)
        for number, moment in enumerate(walked):
            most = now.copy()
            while kernel is not None and kernel.node <= number:
                for value in kernel.over.values():
                    now[self.parts[value]] -= self.sizes[value]
                for value in kernel.writes:
                    now[self.parts[value]] += self.sizes[value]
                if now.sum() > most.sum():
                    most = now.copy()
                for value in set(kernel.frees) - set(kernel.over.values()):
                    now[self.parts[value]] -= self.sizes[value]
                kernel = next(runs, None)
            most[_PART["other"]] += self.beside.get(number, 0)
            found.append(Moment(origin=moment.origin, op=moment.op, peak=most, after=now.copy()))
        return found


class _Run:
    """Runs a half as its generated code would: a value is let go after its last use, what a collective reads once
    that is waited for."""

    def __init__(
        self,
        storages: _Storages,
        constants: dict[str, Any],
        made: Callable[[str], list[torch.Tensor]],
        *,
        compiled: bool,
        together: bool,
    ) -> None:
        self.storages, self.constants, self.made = storages, constants, made
        self.compiled, self.together = compiled, together

    def __call__(
        self, graph: fx.Graph, given: list[Any], names: Sequence[str] = ()
    ) -> tuple[list[torch.Tensor], list[Moment]]:
        env: dict[fx.Node, Any] = {}
        moments: list[Moment] = []
        done = _let_go(graph)
        end = next(iter(graph.find_nodes(op="output")))
        gradients = set(end.all_input_nodes) if names else set()
        given.reverse()
        record = self.storages.record = _Record(self.storages) if self.compiled else None
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = given.pop()
            elif node.op == "get_attr":
                env[node] = self.constants[str(node.target)]
            elif node.op == "call_function":
                self.storages.begin()
                if record is not None:
                    record.node = len(moments)
                env[node] = self._call(node, env)
                moments.append(self._after(node, env, gradients, done.get(node, ())))
                continue
            for old in done.get(node, ()):
                env.pop(old, None)
        results: Any = fx.map_arg(end.args[0], lambda n: env[n])
        if record is not None:
            env.clear()
            moments = record.moments(moments, set(self.storages.alive), self.together)
        return list(results), moments

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        held: Any = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        args, kwargs = held
        kind = _torch.COLLECTIVES.get(node.target)  # type: ignore[arg-type]
        record = self.storages.record
        if kind is not None:
            if record is None:
                return _collective(kind, args[0], tuple(args[1:]))
            record.collective = kind, args[0]
            found = _collective(kind, args[0], tuple(args[1:]))
            record.collective = None
            return found
        if node.target is _torch.functional.wait_tensor.default:
            sources = [n for n in node.all_input_nodes[0].all_input_nodes]
            if record is not None:
                # An all-reduce is done in place.
                apart = _torch.COLLECTIVES.get(node.all_input_nodes[0].target) != "all_reduce"  # type: ignore[call-overload]
                record.waits([args[0], *(t for n in sources if apart for t in _tensors(env[n]))])
            return args[0]
        if node.target is attention_backward:
            self.storages.beside(_accumulators(args[1]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        target: Any = node.target
        try:
            return target(*args, **kwargs)
        except _torch.DynamicOutputShapeException:
            found = self.made(node.meta["origin"][0])
            return found[0] if len(found) == 1 else tuple(found)

    def _after(
        self, node: fx.Node, env: dict[fx.Node, Any], gradients: set[fx.Node], done: Sequence[fx.Node]
    ) -> Moment:
        origin, kind = node.meta["origin"]
        before = list(self.storages.now)
        read = {t.untyped_storage()._cdata for source in node.all_input_nodes for t in _tensors(env[source])}
        for tensor in _tensors(env[node]):
            own = tensor.untyped_storage()._cdata not in read
            if own:
                self.storages.origins[tensor.untyped_storage()._cdata] = origin
            if node in gradients:
                self.storages.label(tensor, "gradients")
            elif own:
                self.storages.label(tensor, _MADE[kind])
        peak, named = np.array(self.storages.most), np.subtract(self.storages.now, before)
        if (peak + named >= 0).all():
            peak = peak + named  # what the op gives was still without a name at its fullest moment
        for old in done:
            env.pop(old, None)
        return Moment(origin=origin, op=kind == "op", peak=peak, after=np.array(self.storages.now))


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments of an op."""
    for each in value:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from _leaves(each)


def _leaves_last(args: Sequence[Any]) -> bool:
    """Whether a reduction with these arguments goes over dims, but not over the last."""
    if len(args) < 2 or not isinstance(args[0], torch.Tensor) or not isinstance(args[1], (list, tuple)):
        return False
    last = args[0].dim() - 1
    return bool(args[1]) and all(isinstance(dim, int) and dim not in (-1, last) for dim in args[1])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def _let_go(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
        if node.target is _torch.functional.wait_tensor.default:
            for source in node.all_input_nodes[0].all_input_nodes:
                last[source] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        if reader.op != "output":
            found.setdefault(reader, []).append(node)
    return found


def _collective(kind: str, x: torch.Tensor, rest: tuple) -> torch.Tensor:
    """What a collective gives for the piece `x`."""
    if kind == "all_gather_into_tensor":
        return x.new_empty((x.shape[0] * rest[0], *x.shape[1:]))
    if kind == "reduce_scatter_tensor":
        return x.new_empty((x.shape[0] // rest[1], *x.shape[1:]))
    return x.new_empty(x.shape)


def _accumulators(q: torch.Tensor) -> int:
    """Bytes that the fused attention kernels take in the backward to sum up the gradient of `q` (batch, heads, queries,
    head_dim): a float32 of its shape, queries in multiples of 128 and head_dim of 32
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp)."""
    batch, heads, queries, width = q.shape
    rows = batch * heads * -(-queries // 128) * 128
    return 4 * rows * (-(-width // 32) * 32 + 1)

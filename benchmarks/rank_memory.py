"""What one rank of a plan really allocates over training steps: the truth that predicted memory is held against.

The rank runs the parallel model that `apply` makes, with its optimizer, in a process group that carries no data
(`fake`), so one process is enough. Three ways to count, all over whole steps (forward, backward, optimizer):

counted    fake tensors: every storage that an op makes, from its making until nothing holds it, `rounds_to` as the
           CUDA caching allocator rounds (512); any size of model
profiled   real tensors on the CPU: what torch.profiler saw its allocator give and take back
compiled   likewise under torch.compile; the fused kernels do nothing, as building them takes minutes and they
           allocate nothing: the buffers are those of Inductor's wrapper
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.passes.graph import Captured
from meshwright.passes.lookup import PlanLookup
from meshwright.passes.placing import placements_of
from meshwright.passes.runtime import parallelize
from meshwright.plans.layouts import local_shape
from meshwright.plans.plan import Plan

__all__ = ["Storages", "fill", "group_of", "measure", "optimizer_of", "rules_aside"]

_functional = torch.ops._c10d_functional


def optimizer_of(name: str, foreach: bool) -> Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer | None]:
    """An optimizer as plans name it; `foreach` as on a GPU, where it is the default."""
    kinds: dict[str, Callable[..., Any]] = {
        "adamw": lambda p: torch.optim.AdamW(p, foreach=foreach),
        "adam": lambda p: torch.optim.Adam(p, foreach=foreach),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, foreach=foreach),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=foreach),
        "none": lambda p: None,
    }
    return kinds[name]


def measure(
    kind: str,
    model: nn.Module,
    captured: Captured,
    plan: Plan,
    *,
    rank: int = 0,
    steps: int = 2,
    rounds_to: int = 1,
    waits: bool = True,
) -> int:
    """Peak bytes of `rank` over `steps` training steps of `model` (on the meta device, or made there) by `plan`.

    What the user holds counts as far as a rank holds it: its pieces of parameters and inputs. `rounds_to` rounds each
    allocation up and `waits` keeps what a collective reads until it is waited for, as groups that carry data do (both
    for `counted`).
    """
    with group_of(plan.mesh.size, rank):
        grid = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axis_names)
        parallel = parallelize(model.to("meta"), captured, plan, grid)
        if kind == "counted":
            return _counted(parallel, captured, plan, grid, steps, Storages(rounds_to, waits=waits))
        return _profiled(parallel, captured, plan, grid, steps, compiled=kind == "compiled")


@contextlib.contextmanager
def group_of(size: int, rank: int) -> Iterator[None]:
    """This process as `rank` of a process group of `size` that carries no data."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers this rank's local shapes, which another rank of an uneven plan does not have.
        _clear_sharding_prop_cache()


def _made(parallel: nn.Module, captured: Captured, plan: Plan, grid: DeviceMesh) -> tuple[list[Any], dict[str, Any]]:
    """Tensors in place of the meta ones of `parallel`, and pieces of inputs to call it with."""
    fill(parallel)
    lookup, coordinate = PlanLookup(plan), tuple(grid.get_coordinate() or ())
    given: list[DTensor] = []
    for source in captured.sources.values():
        if source.kind == "input":
            layout = lookup(source.name).outputs[0]
            assert layout is not None
            shape = local_shape(source.shape, layout, plan.mesh.shape, coordinate)
            local = torch.zeros(shape, dtype=source.dtype)
            whole = DTensor.from_local(
                local,
                grid,
                placements_of(layout),
                run_check=False,
                shape=torch.Size(source.shape),
                stride=torch.empty(source.shape, device="meta").stride(),
            )
            given.append(whole.requires_grad_(source.requires_grad))
    args, kwargs = captured.input_tree.build(given)
    return list(args), dict(kwargs)


def fill(parallel: nn.Module) -> None:
    """Tensors in place of the meta ones of `parallel`; what is tied stays so."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity, which lasts while the old one is held
    for module in parallel.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor.device.type == "meta":
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, on_cpu(tensor)
                    held[key] = made[id(tensor)][1]  # type: ignore[assignment]


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros like one on the meta device, a DTensor of the same placements for a DTensor."""
    inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    made: torch.Tensor = torch.zeros(inner.shape, dtype=inner.dtype)
    if isinstance(tensor, DTensor):
        made = DTensor.from_local(
            made, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _train(call: Callable[..., Any], parallel: nn.Module, made: tuple, plan: Plan, steps: int) -> None:
    args, kwargs = made
    held = [p for p in parallel.parameters() if p.requires_grad]
    foreach = plan.cluster.device != "cpu"
    optimizer = optimizer_of(plan.options.optimizer, foreach)(held) if held else None
    for _ in range(steps):
        outputs = call(*args, **kwargs)
        ends = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        for tensor in (*held, *tree_leaves((args, kwargs))):
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
        del outputs, ends  # a step's outputs are not held during the next one


def _counted(
    parallel: nn.Module, captured: Captured, plan: Plan, grid: DeviceMesh, steps: int, storages: Storages
) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True), storages, rules_aside(storages):
        made = _made(parallel, captured, plan, grid)
        _train(parallel, parallel, made, plan, steps)
    return storages.peak


@contextlib.contextmanager
def rules_aside(storages: Storages) -> Iterator[None]:
    """What DTensor makes to learn the shape of a result is fake in a real run, and so takes nothing there."""
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(self: Any, schema: Any) -> Any:
        storages.counts = False
        try:
            return original(self, schema)
        finally:
            storages.counts = True

    ShardingPropagator._propagate_tensor_meta_non_cached = uncounted  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]


class Storages(TorchDispatchMode):
    """Bytes of the storages alive: `now`, and at the worst moment `peak`."""

    def __init__(self, rounds_to: int = 1, *, waits: bool = True) -> None:
        super().__init__()
        self.waits, self.counts = waits, True
        self.rounds_to, self.now, self.peak = rounds_to, 0, 0
        self.alive: dict[int, int] = {}
        # What collectives read, by the storage of their result.
        self.waiting: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func is _functional.wait_tensor.default:
            self.waiting.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        found = func(*args, **(kwargs or {}))
        if not self.counts:
            return found
        if self.waits and func.namespace == "_c10d_functional":
            self.waiting[found.untyped_storage()._cdata] = args[0]
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return found

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        size = -(-storage.nbytes() // self.rounds_to) * self.rounds_to
        self.alive[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def _profiled(
    parallel: nn.Module, captured: Captured, plan: Plan, grid: DeviceMesh, steps: int, *, compiled: bool
) -> int:
    with _uncollected(), _without_kernels() if compiled else contextlib.nullcontext():
        if compiled:
            # What compiling itself allocates is over after a step of its own.
            made = _made(parallel, captured, plan, grid)
            call: Callable[..., Any] = torch.compile(parallel)
            _train(call, parallel, made, plan, 1)
            held = sum(
                t.untyped_storage().nbytes()
                for t in (_inner(t) for t in (*parallel.parameters(), *parallel.buffers(), *tree_leaves(made)))
                if t is not None
            )
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                _train(call, parallel, made, plan, steps)
            return held + _peak(profiler)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            made = _made(parallel, captured, plan, grid)
            _train(parallel, parallel, made, plan, steps)
        return _peak(profiler)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage of earlier runs is freed meanwhile: a profile counts what is given back, whoever took it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _inner(tensor: Any) -> torch.Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor if isinstance(tensor, torch.Tensor) else None


def _peak(profiler: profile) -> int:
    """The most bytes that were taken and not given back at one moment of a profile."""
    assert profiler.profiler is not None
    now = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Inductor's fused CPU kernels do nothing."""
    original = AsyncCompile.cpp_pybinding
    AsyncCompile.cpp_pybinding = lambda self, *args, **kwargs: lambda *given: None
    try:
        with torch._inductor.config.patch(fx_graph_cache=False):
            yield
    finally:
        AsyncCompile.cpp_pybinding = original

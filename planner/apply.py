"""From a plan to a running model: replay a plan, or plan and apply in one call, now or at the model's first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UNSET
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..passes.blocks import repeated_blocks
from ..passes.capture import capture
from ..passes.graph import Captured
from ..passes.lookup import PlanLookup
from ..passes.microbatches import microbatch
from ..passes.naming import op_name
from ..passes.pipeline_runtime import parallelize_pipeline
from ..passes.rank_mesh import AXIS
from ..passes.runtime import parallelize
from ..passes.training_step import loss_of
from ..passes.trees import flatten_call
from ..plans.clusters import Cluster
from ..plans.errors import MeshwrightError, ReplayError, RequestError
from ..plans.meshes import Mesh
from ..plans.pipelines import Pipeline
from ..plans.plan import Plan
from ..plans.sizes import check_sizes
from ..plans.uneven import Uneven
from .api import LossFunction, plan
from .arguments import check_arguments
from .dynamic import at_planned_sizes, check_layouts
from .sharding.folding import Blocks
from .sharding.own_rules import OpRule
from .sharding.write import model_of

__all__ = [
    "agreed",
    "agreed_bytes",
    "apply",
    "autoparallelize",
    "capture_by",
    "capture_for",
    "check_fits",
    "check_torch",
    "device_mesh_for",
    "device_mesh_of",
    "here",
    "usual_here",
]

_TORCH_RANGE = ("2.13", "2.15")


def apply(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    device_mesh: DeviceMesh | None = None,
    in_place: bool = False,
    rules: Sequence[OpRule] = (),
    adapt: bool = False,
    timeout_s: float = 600.0,
) -> nn.Module:
    """`model` run by `plan`: nothing is solved, unless `adapt` asks to carry the plan over to a changed model first.
    Every rank calls this with the same model and inputs of the same shapes.

    `loss` must be the one that the plan was made with, and so must `rules`. Without `device_mesh`, one is made on the
    process group.
    Raises ReplayError naming the first difference when the plan is for another model, mesh or torch version.

    A plan with a pipeline is for micro-batches: `args` and `kwargs` are the whole batch, and the model is trained by
    `model.step(batch)`, in which no rank waits for another longer than `timeout_s`.
    """
    check_arguments(
        plan=plan, model=model, args=args, kwargs=kwargs, loss=loss, device_mesh=device_mesh, in_place=in_place,
        rules=rules, adapt=adapt, timeout_s=timeout_s,
    )  # fmt: skip
    if plan.pipeline is not None:
        plan.pipeline.check()
    mixed = plan.stage_meshes is not UNSET
    mesh = device_mesh if device_mesh is not None or mixed else device_mesh_for(plan.mesh, plan.pipeline)
    if adapt:
        from .adapt import adapt as carried_over

        plan = agreed(lambda: carried_over(plan, model, args, kwargs, loss=loss, rules=rules).plan)
    sound = partial(check_layouts, plan, rules=rules)
    if plan.pipeline is not None:
        one = microbatch(args, kwargs or {}, plan.pipeline.microbatches)
        captured = capture_for(plan, model, *one, loss or loss_of, rules)
        return parallelize_pipeline(
            model, captured, plan, mesh, loss=loss, in_place=in_place, sound=sound, timeout_s=timeout_s
        )
    assert mesh is not None
    captured = capture_for(plan, model, args, kwargs or {}, loss, rules)
    _same_ops(plan, captured)
    return parallelize(model, captured, plan, mesh, loss=loss, in_place=in_place, sound=sound)


def capture_for(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss: LossFunction | None,
    rules: Sequence[OpRule] = (),
) -> Captured:
    """The model captured as the plan wants it, once it is sure that the plan is for it."""
    check_torch(plan)
    captured = capture_by(plan, model, args, kwargs, loss)
    check_fits(plan, model, captured, rules=rules)
    return captured


def capture_by(
    plan: Plan, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], loss: LossFunction | None
) -> Captured:
    """The model captured to be run by `plan`: what is computed again is decided at the sizes of the plan."""
    tensors, tree = flatten_call(args, kwargs)
    check_sizes(plan, {name: tuple(t.shape) for name, t in zip(tree.names, tensors, strict=True)})
    mode = plan.options.recompute
    planned = None if mode == "none" else at_planned_sizes(plan, args, kwargs)
    again = None if planned is None else capture(model, *planned, loss=loss, recompute=mode).again
    return capture(model, args, kwargs, loss=loss, recompute=mode, again=again)


def check_fits(
    plan: Plan,
    model: nn.Module,
    captured: Captured,
    blocks: Blocks | None = None,
    *,
    rules: Sequence[OpRule] = (),
) -> None:
    """ReplayError when `plan` is for another model than `captured`, naming the first difference."""
    check_torch(plan)
    _same_tensors(plan, model)
    inputs = {s.name: s for s in captured.sources.values() if s.kind == "input"}
    for tensor in plan.inputs:
        found = inputs.get(tensor.name)
        if found is None:
            raise ReplayError(
                f"'plan' must be for this model's inputs, got one with {tensor.name}, which this call does not "
                "give; plan again"
            )
    for name in inputs:
        if name not in {t.name for t in plan.inputs}:
            raise ReplayError(f"'plan' must be for this model's inputs, got one without {name}; plan again")
    shapes = {name: tuple(source.shape) for name, source in inputs.items()}
    check_sizes(plan, shapes)
    if any(shapes[t.name] != t.shape for t in plan.inputs):
        check_layouts(plan, captured, rules=rules)
        return
    digest = model_of(captured, plan.model.name, blocks or Blocks(runs=repeated_blocks(model))).digest
    if digest != plan.model.digest:
        raise ReplayError(
            "'plan' must be for this model, got one for a model of another structure (fingerprint "
            f"{plan.model.digest[:12]}, this one {digest[:12]}); plan again"
        )


def _same_ops(plan: Plan, captured: Captured) -> None:
    """ReplayError at the first op that `plan` does not know."""
    lookup = PlanLookup(plan)
    for node in captured.ops():
        try:
            if op_name(node) != "getitem":
                lookup(captured.names[node])
        except ReplayError as error:
            raise ReplayError(
                f"'plan' must know every op of this step, got one without {captured.names[node]}; give apply the loss, "
                "mode (train or eval), arguments, inputs with requires_grad, autocast and rules that it was made with, "
                "or plan again"
            ) from error


def check_torch(plan: Plan) -> None:
    """ReplayError where the plan's torch version, or the one that runs, is outside of the range."""
    have, want = (
        tuple(int(x) for x in v.split("+")[0].split(".")[:2]) for v in (torch.__version__, plan.torch_version)
    )
    low, high = (tuple(int(x) for x in v.split(".")) for v in _TORCH_RANGE)
    if not low <= want <= high or not low <= have <= high:
        raise ReplayError(
            f"'plan' must be of a torch version from {_TORCH_RANGE[0]} to {_TORCH_RANGE[1]}, got version "
            f"{plan.torch_version} "
            f"(running {torch.__version__}); plan again with this version"
        )


def _same_tensors(plan: Plan, model: nn.Module) -> None:
    """ReplayError at the first parameter that plan and model do not share."""
    blocks = Blocks(runs=repeated_blocks(model))
    have = {blocks.pattern(n): p for n, p in model.named_parameters()} | dict(model.named_parameters())
    want = {t.name: t for t in plan.parameters}
    counts = {stamp.pattern: len(stamp.numbers) for run in blocks.runs for stamp in run.stamps}
    for block in plan.model.blocks:
        count = counts.get(block.pattern)
        if count != block.count:
            raise ReplayError(
                f"'plan' must be for this model, got one with {block.count} blocks {block.pattern}, the model has "
                f"{count or 0}; plan again"
            )
    for name, tensor in want.items():
        if name not in have:
            raise ReplayError(
                f"'plan' must be for this model, got one with parameter {name}, which the model lacks; plan again"
            )
        if tuple(have[name].shape) != tensor.shape or str(have[name].dtype) != f"torch.{tensor.dtype}":
            raise ReplayError(
                f"'plan' must be for this model, got {name} of shape {list(tensor.shape)} {tensor.dtype}, the "
                "model has "
                f"{list(have[name].shape)} {str(have[name].dtype).removeprefix('torch.')}; plan again"
            )
    for name, _ in model.named_parameters():
        if name not in want and blocks.pattern(name) not in want:
            raise ReplayError(f"'plan' must be for this model, got one without its parameter {name}; plan again")


def autoparallelize(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    cluster: Cluster | DeviceMesh | str | None = None,
    mesh: Mesh | str | None = None,
    plan: Plan | None = None,
    loss: LossFunction | None = None,
    **options: Any,
) -> nn.Module:
    """`model` split over the process group: planned (unless `plan` is given) and applied.

    With `args` or `kwargs` this happens now; without, `model` itself is planned at its first call, from its inputs:
    only then does it have its DTensor parameters, so an optimizer is made after it. `cluster` is the machine to plan
    for (by default what the process group runs on) or a DeviceMesh to use. Other `options` are those of `plan`;
    `compiled` is False unless given, because the model runs eagerly until torch.compile is called on it.
    """
    check_arguments(
        model=model, args=() if args is None else args, kwargs=kwargs, loss=loss,
        mesh=mesh, **({} if plan is None else {"plan": plan}), **options,
        **({} if cluster is None or isinstance(cluster, DeviceMesh) else {"cluster": cluster}),
    )  # fmt: skip
    if not dist.is_initialized():
        raise RequestError(
            "'autoparallelize' must run in a process group, got none; start with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if args is None and kwargs is None:
        return _at_first_call(model, dict(cluster=cluster, mesh=mesh, plan=plan, loss=loss, **options))
    return _now(model, tuple(args or ()), dict(kwargs or {}), cluster, mesh, plan, loss, options, in_place=False)


def _now(
    model: nn.Module,
    args: tuple,
    kwargs: dict,
    cluster: Cluster | DeviceMesh | str | None,
    mesh: Mesh | str | None,
    given: Plan | None,
    loss: Any,
    options: dict[str, Any],
    *,
    in_place: bool,
) -> nn.Module:
    device_mesh = None
    if isinstance(cluster, DeviceMesh):
        device_mesh = cluster
        names = device_mesh.mesh_dim_names or Mesh.of(tuple(device_mesh.mesh.shape)).axis_names
        mesh, cluster = Mesh(tuple(device_mesh.mesh.shape), tuple(names)), None
    where: Cluster | str = here() if cluster is None else cluster
    if given is None:
        # With a pipeline a mesh is that of one of its ranks.
        grid = mesh or (None if "pipeline" in options or "microbatches" in options else usual_here())
        options.setdefault("compiled", False)
        given = agreed(lambda: plan(model, args, kwargs, cluster=where, mesh=grid, loss=loss, **options))
    rules = options.get("rules", ())
    return apply(given, model, args, kwargs, loss=loss, device_mesh=device_mesh, in_place=in_place, rules=rules)


def agreed(make: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 makes, on every rank, or the error that it meets: ranks that plan each for themselves may
    stop at different plans, and one that fails would leave the others waiting."""
    return Plan.from_bytes(agreed_bytes(lambda: make().to_bytes()))


def agreed_bytes(make: Callable[[], bytes]) -> bytes:
    """What rank 0 makes, on every rank, or the error that it meets."""
    box: list[Any] = [None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except Exception as error:
            failed = error
            box = [error if isinstance(error, MeshwrightError) else RuntimeError(f"rank 0 could not plan: {error!r}")]
    dist.broadcast_object_list(box, src=0)
    if failed is not None:
        raise failed
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def here(ranks: int | None = None) -> Cluster:
    """The machine that the process group runs on, or so many `ranks` of it."""
    size = ranks or dist.get_world_size()
    if not torch.cuda.is_available():
        return Cluster(device="cpu", nodes=1, devices_per_node=size)
    per_node = min(size, torch.cuda.device_count())
    return Cluster(
        device=_device_name(torch.cuda.get_device_name()), nodes=-(-size // per_node), devices_per_node=per_node
    )


def usual_here() -> Mesh:
    """One axis over all ranks of the process group."""
    return Mesh.of((dist.get_world_size(),))


def _device_name(name: str) -> str:
    """The data sheet for a CUDA device's name."""
    known = {"H100 80GB HBM3": "h100-sxm", "H100 PCIe": "h100-pcie", "H200": "h200-sxm", "A100-SXM4-80GB": "a100-sxm",
    "A100-SXM4-40GB": "a100-sxm-40gb",
             "A100 80GB PCIe": "a100-pcie", "B200": "b200-sxm", "V100": "v100-sxm", "L40S": "l40s", "4090":
             "rtx-4090", "3090": "rtx-3090"}  # fmt: skip
    for part, sheet in known.items():
        if part in name:
            return sheet
    raise RequestError(
        f"'cluster' must be given on a device without a data sheet, got {name!r}; pass cluster='h100-sxm:8' or "
        "the nearest one"
    )


def device_mesh_for(mesh: Mesh, pipeline: Pipeline | None = None, *, mark: str = "") -> DeviceMesh:
    """A DeviceMesh of the shape of `mesh`, after an axis for the ranks of a pipeline, on the running process group; the
    default one must have as many ranks.

    DTensor's caches tell meshes by their shape, ranks and names: one that takes the place of an earlier one in the same
    process needs a `mark` at its names, or tensors on it are taken for tensors on the earlier one."""
    if not dist.is_initialized():
        raise RequestError(
            "'device_mesh' must be given, or a process group be running, got neither; start with torchrun and "
            "call torch.distributed.init_process_group()"
        )
    stages = 1 if pipeline is None else pipeline.ranks
    if dist.get_world_size() != stages * mesh.size:
        what = f"a mesh {mesh} of {mesh.size}" if pipeline is None else f"{stages} pipeline ranks of a mesh {mesh}"
        raise ReplayError(
            f"'plan' must be for as many ranks as run, got {what} for "
            f"{dist.get_world_size()} ranks; plan again for this mesh"
        )
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    names = tuple(f"{name}{mark}" for name in mesh.axis_names)
    if pipeline is not None:
        return init_device_mesh(device, (stages, *mesh.shape), mesh_dim_names=(f"{AXIS}{mark}", *names))
    return init_device_mesh(device, mesh.shape, mesh_dim_names=names)


def device_mesh_of(plan: Uneven, rank: int, *, mark: str = "") -> DeviceMesh:
    """The DeviceMesh of the replica that `rank` is in; all ranks make all of them."""
    device, found = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu", []
    for portion, row in zip(plan.portions, plan.split(range(dist.get_world_size())), strict=True):
        pipeline = portion.plan.pipeline
        mesh, first = portion.plan.mesh, () if pipeline is None else (pipeline.ranks,)
        sizes, names = (*first, *mesh.shape), (*((AXIS,) if first else ()), *mesh.axis_names)
        ranks = torch.tensor(row).reshape(sizes)
        found.append(DeviceMesh(device, ranks, mesh_dim_names=tuple(f"{name}{mark}" for name in names)))
    return found[plan.portion_of(rank)]


class _Waiting(nn.Module):
    """A model that is planned at its first call. Not made directly."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Plan and apply, then run as the parallel model, whose program has the hooks that are on the model's call."""
        self._plan(args, kwargs)
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        return self(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Plan and apply, then train as the parallel model."""
        batch = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(batch, Mapping):
            args, kwargs = (), dict(batch)
        elif isinstance(batch, (tuple, list)):
            args = tuple(batch)
        self._plan(args, kwargs)
        model: Any = self
        return model.step(*args, **kwargs)

    def _plan(self, args: tuple, kwargs: dict[str, Any]) -> None:
        wanted = self.__dict__.pop("_meshwright_request")
        self.__class__ = type(self).__mro__[2]
        given = {k: wanted.pop(k) for k in ("cluster", "mesh", "plan", "loss")}
        _now(self, args, kwargs, given["cluster"], given["mesh"], given["plan"], given["loss"], wanted, in_place=True)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: an optimizer on these parameters would train tensors that the first call replaces."""
        raise RequestError(
            "'parameters' must be asked for after the model's first call, which plans it and makes them DTensors; "
            "run one batch first, or pass example inputs to autoparallelize"
        )


def _at_first_call(model: nn.Module, request: dict[str, Any]) -> nn.Module:
    cls = type(model)
    model.__class__ = type(cls.__name__, (_Waiting, cls), {"__module__": cls.__module__})
    model.__dict__["_meshwright_request"] = request
    return model

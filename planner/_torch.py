"""Every private name of PyTorch that this room uses.

Tested with torch 2.13; tests/planner/test_torch_names.py names each of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group, _world
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Partial, Placement
from torch.export import Dim
from torch.export.dynamic_shapes import _DerivedDim, _DimHint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "abort_communicators",
    "count_groups_anew",
    "dtensor_rules",
    "export_dim",
    "forget_meshes",
    "is_aten",
    "issued",
    "last_collective",
    "ops_seen",
    "overload_of",
    "spelled",
]

# One placement per output, then one per tensor input; None where there is no tensor.
RawRule = list["str | None"]


def is_aten(op: Any) -> bool:
    """Whether `op` is one of PyTorch's own."""
    return isinstance(op, OpOverload) and op.namespace in ("aten", "prims")


def overload_of(op: Any) -> str:
    """The overload of an op: Tensor of aten.add.Tensor; empty for a Python function."""
    return op._overloadname if isinstance(op, OpOverload) else ""


def spelled(op: Any) -> str:
    """An op as its users write it: aten::add, mylib::combine."""
    return op._schema.name if isinstance(op, OpOverload) else getattr(op, "__name__", str(op))


def abort_communicators() -> None:
    """Let NCCL's collectives on all groups fail now; gloo has nothing of the kind."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        _abort_process_group()


def count_groups_anew() -> None:
    """Give the next process group the name that it has on processes that have made none: groups go by a count, which
    one that could not be made has raised, and which only the end of a default group that was made sets back."""
    if not dist.is_initialized():
        _world.group_count = 0


def forget_meshes() -> None:
    """Empty DTensor's caches: they hold every mesh that was ever used, and with it the threads and files of its process
    groups, which `destroy_process_group` leaves to the last reference."""
    _clear_sharding_prop_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()


def issued(group: dist.ProcessGroup) -> int:
    """How many collectives this process has begun on `group`."""
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]


def last_collective() -> str:
    """The collective that this process began last, in words; empty where none is recorded (TORCH_FR_BUFFER_SIZE)."""
    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["record_id"])
    kind = str(last["profiling_name"]).rpartition(":")[2]
    return f"{kind} {last['collective_seq_id']} of group {last['process_group'][1]}"


def export_dim(value: object) -> tuple[str, int, int | None, Callable[[int], int] | None] | str | None:
    """What torch.export says of a dim: (name, least, most, size as a function of another dim's, if it is one), 'auto',
    'static', or None when `value` is nothing of torch.export."""
    if isinstance(value, _DimHint):
        return "static" if value.type.name == "STATIC" else "auto"
    if isinstance(value, _DerivedDim):
        root: Any = value.root
        return root.__name__, *_span(root), value.fn
    return (value.__name__, *_span(value), None) if isinstance(value, Dim) else None


def _span(dim: Any) -> tuple[int, int | None]:
    return int(dim.min), int(dim.max) if isinstance(dim.max, int) else None


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[torch.Tensor], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        values, results = ([t for t in tree_leaves(v) if isinstance(t, torch.Tensor)] for v in ((args, kwargs), out))
        self.calls.append((func, values, results))
        return out


@contextlib.contextmanager
def ops_seen() -> Iterator[list[tuple[Any, list[torch.Tensor], list[torch.Tensor]]]]:
    """The ops that run while this is entered, each with the tensors that it takes and gives."""
    with _Seen() as mode:
        yield mode.calls


def dtensor_rules(op: Any, args: tuple, kwargs: dict[str, Any], outputs: int, size: int) -> list[RawRule] | None:
    """What DTensor's own rules allow for `op` on one axis of `size` devices; None when it has no rule.

    `args` and `kwargs` hold (fake) tensors. Placements other than R, S(d) and P(sum|max|min) are left out.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    single = propagator.op_single_dim_strategy_funcs.get(op)
    if single is not None:
        metas = tree_map_only(torch.Tensor, _meta, (args, kwargs))
        rows = [list(row) for row in single.func(op, *metas)]
        return [texts for row in rows if (texts := _texts(row)) is not None]
    strategy = propagator.op_strategy_funcs.get(op)
    if strategy is None:
        return None
    schema = _schema(op, args, kwargs, size, propagator.op_to_schema_info.get(op))
    try:
        found: Any = strategy(schema)
        specs = found.strategies
    except (IndexError, AssertionError, NotImplementedError, RuntimeError, TypeError, AttributeError):
        return None  # a rule that cannot look at several layouts at once is no rule for us: the op is refused by name
    return _rows(specs, outputs)


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _schema(op: Any, args: tuple, kwargs: dict[str, Any], size: int, info: RuntimeSchemaInfo | None) -> OpSchema:
    """The call as DTensor's rules take it: every tensor in each layout that it can have on one axis."""
    mesh = DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=0)

    def options(tensor: torch.Tensor) -> OpStrategy:
        shards = [Shard(d) for d in range(tensor.dim()) if tensor.shape[d] > 1]
        placements: list[Placement] = [Replicate(), *shards, Partial()]
        return OpStrategy([OpSpec(DTensorSpec(mesh, (p,), tensor_meta=_meta(tensor))) for p in placements])

    def wrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return options(value)
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, torch.Tensor) for v in value):
            return TupleStrategy([options(v) for v in value])
        return value

    return OpSchema(
        op, tuple(wrap(a) for a in args), {k: wrap(v) for k, v in kwargs.items()}, info or RuntimeSchemaInfo()
    )


def _rows(specs: Sequence[OpSpec], outputs: int) -> list[RawRule]:
    found: list[RawRule] = []
    for spec in specs:
        outs: Any = spec.output_specs
        outs = outs if isinstance(outs, (tuple, list)) else [outs]
        ins = [s.placements[0] for s in spec.input_specs or []]
        texts = _texts([*(o.placements[0] if o is not None else None for o in outs), *ins])
        if texts is not None and len(outs) == outputs and texts not in found:
            found.append(texts)
    return found


def _texts(row: Sequence[Any]) -> RawRule | None:
    """A rule in our words, None when it uses a placement that is not among them."""
    texts: RawRule = []
    for placement in row:
        if placement is None:
            texts.append(None)
        elif isinstance(placement, Replicate):
            texts.append("R")
        elif type(placement) is Shard or type(placement).__name__ == "_ShardingPlaceholder":
            texts.append(f"S({placement.dim})")
        elif type(placement) is Partial and placement.reduce_op in ("sum", "max", "min"):
            texts.append(f"P({placement.reduce_op})")
        else:
            return None
    return texts

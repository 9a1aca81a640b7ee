"""Each private name of PyTorch that planner/_torch.py uses exists, and is what it is used for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.planner import _torch

from ..test_house import private_torch_names
from ..torch_names import resolve

NAMES = [
    "torch._C._distributed_c10d._dump_fr_trace_json",
    "torch._ops.OpOverload",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.distributed_c10d._world.group_count",
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear",
    "torch.distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh.cache_clear",
    "torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear",
    "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs",
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs",
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor._op_schema.OpSchema",
    "torch.distributed.tensor._op_schema.OpSpec",
    "torch.distributed.tensor._op_schema.OpStrategy",
    "torch.distributed.tensor._op_schema.RuntimeSchemaInfo",
    "torch.distributed.tensor._op_schema.TupleStrategy",
    "torch.export.dynamic_shapes._DerivedDim",
    "torch.export.dynamic_shapes._DimHint",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
]
aten = torch.ops.aten


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    resolve(name)


def test_the_list_is_complete() -> None:
    used = set(private_torch_names(Path(_torch.__file__)))
    assert {name for name in used if not any(known.startswith(name) for known in NAMES)} == set()


def test_ops_have_a_spelling_and_an_overload() -> None:
    assert _torch.overload_of(aten.add.Tensor) == "Tensor"
    assert _torch.spelled(aten.add.Tensor) == "aten::add"
    assert _torch.is_aten(aten.add.Tensor)
    assert not _torch.is_aten(len)
    assert (_torch.overload_of(len), _torch.spelled(len)) == ("", "len")


def test_dtensor_rules_of_both_registries() -> None:
    x = torch.zeros(4, 6)
    single = _torch.dtensor_rules(aten.relu.default, (x,), {}, 1, 2)
    assert single is not None
    assert ["S(1)", "S(1)"] in single
    older = _torch.dtensor_rules(aten.nansum.default, (x,), {}, 1, 2)
    assert older is not None
    assert ["P(sum)", "S(1)"] in older
    assert _torch.dtensor_rules(aten.searchsorted.Tensor, (x, x), {}, 1, 2) is None

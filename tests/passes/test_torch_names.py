"""Each private name of PyTorch that passes/_torch.py uses exists, and is what it is used for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.passes import _torch

from ..test_house import private_torch_names
from ..torch_names import resolve

NAMES = [
    "torch._C._get_mkldnn_enabled",
    "torch._C._set_mkldnn_enabled",
    "torch._VF",
    "torch._higher_order_ops.cond.cond_op",
    "torch._higher_order_ops.effects._get_effect",
    "torch._higher_order_ops.effects._register_effectful_op",
    "torch._higher_order_ops.flex_attention.flex_attention",
    "torch._higher_order_ops.flex_attention.math_attention",
    "torch._higher_order_ops.map.map_impl",
    "torch._higher_order_ops.scan.scan_op",
    "torch._higher_order_ops.while_loop.while_loop_op",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
    "torch.nn.attention.flex_attention._validate_device",
    "torch.utils.checkpoint.CheckpointFunction",
    "torch._C._autograd._saved_tensors_hooks_set_tracing",
    "torch._decomp.core_aten_decompositions",
    "torch._dynamo.utils.set_locals_to_steal",
    "torch._decomp.decompositions._rnn_helper",
    "torch._decomp.get_decompositions",
    "torch._functorch._aot_autograd.descriptors.GradAOTOutput",
    "torch._functorch._aot_autograd.descriptors.InputMutationAOTOutput",
    "torch._functorch._aot_autograd.descriptors.PlainAOTInput",
    "torch._functorch._aot_autograd.descriptors.PlainAOTOutput",
    "torch._functorch._aot_autograd.descriptors.TangentAOTInput",
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.compiler._is_compiling_flag",
    "torch.distributed.tensor.experimental._func_map._local_map_wrapped",
    "torch.fx.graph._BoxedCodeGen",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
    "torch.fx.traceback.current_meta",
    "torch.fx.traceback.preserve_node_meta",
    "torch.ops._c10d_functional.all_gather_into_tensor.default",
    "torch.ops._c10d_functional.all_reduce.default",
    "torch.ops._c10d_functional.all_to_all_single.default",
    "torch.ops._c10d_functional.reduce_scatter_tensor.default",
    "torch.ops._c10d_functional.wait_tensor.default",
    "torch.ops.aten._linalg_check_errors.default",
    "torch.ops.aten._weight_norm_interface_backward.default",
    "torch.utils._mode_utils.no_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
]


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    resolve(name)


def test_the_list_is_complete() -> None:
    used = set(private_torch_names(Path(_torch.__file__)))
    assert {name for name in used if not any(known.startswith(name) for known in NAMES)} == set()


def test_ops_have_a_schema_with_argument_names() -> None:
    names = _torch.argument_names(torch.ops.aten.convolution.default)
    assert names[:3] == ["input", "weight", "bias"]


def test_library_code_sees_that_it_is_traced() -> None:
    with _torch.exporting():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()

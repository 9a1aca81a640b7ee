"""Every private name of PyTorch that this room uses, tested with torch 2.13 and held by tests/passes/test_torch_names.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "core_decompositions",
    "data_dependent_errors",
    "decompositions",
    "exporting",
    "joint_graph",
    "module_scope",
]

data_dependent_errors: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's own decompositions of `ops`, and ours where it has none."""
    return {**get_decompositions(list(ops)), torch.ops.aten._weight_norm_interface_backward.default: _weight_norm_backward}


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """w = g * v / |v|, the norm over all dims but `dim`."""
    dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(dims, keepdim=True) / norms
    return g / norms * (grad - v * along / norms), along


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions to core ATen."""
    return dict(core_aten_decompositions())


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Tell library code that it is being traced, so that it takes its data-independent paths (torch.compiler.is_compiling)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def module_scope(path: Sequence[str]) -> None:
    """Label the nodes traced from here on with the module path (outermost first)."""
    fx_traceback.current_meta["nn_module_stack"] = {name: (name, "") for name in path}


def joint_graph(module: torch.nn.Module, inputs: Sequence[Any], table: dict[Any, Callable[..., Any]]) -> torch.fx.GraphModule:
    """The joint forward and backward graph of `module` on `inputs`, by AOTAutograd.

    Placeholders and outputs carry `meta['desc']`; forward nodes `nn_module_stack`, backward nodes `fwd_nn_module_stack`.
    """
    with contextlib.ExitStack() as stack, fx_traceback.preserve_node_meta():
        joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs), decompositions=table)
        return joint.graph_module

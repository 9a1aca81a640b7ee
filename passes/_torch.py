"""Every private name of PyTorch that this room uses.

Tested with torch 2.13; tests/passes/test_torch_names.py names each of them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as checkpoints
from torch import _VF
from torch._C._autograd import _saved_tensors_hooks_set_tracing
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._decomp import decompositions as written
from torch._dynamo.utils import set_locals_to_steal
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.effects import _get_effect, _register_effectful_op
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor.experimental import _func_map
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import _BoxedCodeGen
from torch.nn.attention import flex_attention as flexible
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "local_map_arguments",
    "local_maps_go_to",
    "COLLECTIVES",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "argument_names",
    "boxed",
    "call_hooks",
    "core_decompositions",
    "data_dependent_errors",
    "decompositions",
    "exporting",
    "fake_mode_of",
    "flexible_attention_on_cpu",
    "functional",
    "joint_graph",
    "keep_saved_tensor_hooks",
    "module_scope",
    "no_dispatch",
    "operators_go_to",
    "packing_goes_to",
    "plain_flexible_attention",
    "recurrent_layers_go_to",
    "reentrant_checkpoints_go_to",
    "stealing",
    "tensor_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "unchecked_linear_algebra",
    "without_mkldnn",
]

data_dependent_errors: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

functional = torch.ops._c10d_functional
# The functional collectives that local programs use, by op.
COLLECTIVES: Mapping[Any, str] = {
    functional.all_reduce.default: "all_reduce",
    functional.all_gather_into_tensor.default: "all_gather_into_tensor",
    functional.reduce_scatter_tensor.default: "reduce_scatter_tensor",
    functional.all_to_all_single.default: "all_to_all_single",
}


def tensor_hooks(tensor: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks of a tensor: on its gradient, and on itself once that is accumulated."""
    found: list[Any] = [tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}]
    return list(found[0].values()), list(found[1].values())


def call_hooks(module: torch.nn.Module) -> list[dict[int, Any]]:
    """All that a module keeps of hooks on its call and on the backward of it."""
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]


def decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's own decompositions of `ops`."""
    return get_decompositions(list(ops))


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions to core ATen."""
    return dict(core_aten_decompositions())


def argument_names(op: Any) -> list[str]:
    """Names of the arguments of an op, in the order of its schema."""
    return [argument.name for argument in op._schema.arguments]


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The mode of the first fake tensor anywhere in `values`."""
    return next((value.fake_mode for value in tree_leaves(values) if isinstance(value, FakeTensor)), None)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Tell library code that it is being traced, so that it takes its data-independent paths.

    It reads torch.compiler.is_compiling.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def local_map_arguments(function: Any) -> tuple | None:
    """What local_map was given to make `function`: the function, placements of outputs, inputs and input gradients,
    mesh, whether to redistribute. None when it did not make it."""
    made = isinstance(function, functools.partial) and function.func is _func_map._local_map_wrapped
    return function.args if made else None


def _through(*given: Any, **kwargs: Any) -> Any:
    return _meshwright_handler(given[:6], given[6:], kwargs)  # type: ignore[name-defined] # noqa: F821


@contextlib.contextmanager
def local_maps_go_to(handler: Callable[[tuple, tuple, dict[str, Any]], Any]) -> Iterator[None]:
    """Let calls of functions that local_map made go to `handler`, with what local_map was given, args and kwargs.

    Such a function is a partial of one function of PyTorch, whose code is exchanged meanwhile.
    """
    wrapped: Any = _func_map._local_map_wrapped
    before = wrapped.__code__, wrapped.__globals__.get("_meshwright_handler")
    wrapped.__globals__["_meshwright_handler"] = handler
    wrapped.__code__ = _through.__code__
    try:
        yield
    finally:
        wrapped.__code__, wrapped.__globals__["_meshwright_handler"] = before


@contextlib.contextmanager
def _holding(where: Any, **values: Any) -> Iterator[None]:
    """Let attributes of `where` have other values meanwhile."""
    before = {name: vars(where).get(name) for name in values}
    for name, value in values.items():
        setattr(where, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(where, name)
            else:
                setattr(where, name, value)


@contextlib.contextmanager
def operators_go_to(handlers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let calls of the higher-order operators that `handlers` names (scan, map_impl, cond, while_loop, flex_attention)
    go to the handlers, whose parameters are those of the operators."""
    with contextlib.ExitStack() as stack:
        for op in (scan_op, map_impl, cond_op, while_loop_op, flex_attention):
            handler = handlers[op.name()]
            stack.enter_context(_holding(type(op), __call__=lambda self, *a, _to=handler, **k: _to(*a, **k)))
        yield


def plain_flexible_attention(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flex attention by products and a softmax: the result, and the logarithms of sums and the maxima by base 2."""
    return math_attention(*given)


@contextlib.contextmanager
def flexible_attention_on_cpu() -> Iterator[None]:
    """Let flex attention be called as it is on a GPU: with gradients, and without a compilation of its own."""
    with _holding(flexible, _validate_device=lambda *_: None, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True):
        yield


@contextlib.contextmanager
def packing_goes_to(pack: Callable[..., Any], pad: Callable[..., Any]) -> Iterator[None]:
    """Let sequences be packed, and padded again, by functions called as PyTorch's are."""
    with _holding(_VF, _pack_padded_sequence=pack, _pad_packed_sequence=pad):
        yield


@contextlib.contextmanager
def reentrant_checkpoints_go_to(handler: Callable[..., Any]) -> Iterator[None]:
    """Let reentrant checkpoints go to `handler`: a function, whether its draws are to be the same, its arguments."""
    with _holding(checkpoints, CheckpointFunction=type("Reentrant", (), {"apply": staticmethod(handler)})):
        yield


@contextlib.contextmanager
def recurrent_layers_go_to(handler: Callable[..., Any]) -> Iterator[None]:
    """Let recurrent layers be stacked by `handler`: PyTorch's own decomposition forgets the dropout between them."""
    with _holding(written, _rnn_helper=handler):
        yield


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Let no op of that library be used."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def unchecked_linear_algebra() -> Iterator[None]:
    """Let checks of linear algebra that raise leave no trace."""
    op = torch.ops.aten._linalg_check_errors.default
    before = _get_effect(op)
    _register_effectful_op(op, None)
    try:
        yield
    finally:
        _register_effectful_op(op, before)


def module_scope(path: Sequence[str]) -> None:
    """Label the nodes traced from here on with the module path (outermost first)."""
    fx_traceback.current_meta["nn_module_stack"] = {name: (name, "") for name in path}


def keep_saved_tensor_hooks() -> None:
    """Let checkpointed regions save as they do outside of a trace, until the trace ends: AOTAutograd switches that off
    while it traces, and would lose what the backward computes again."""
    _saved_tensors_hooks_set_tracing(False)


def joint_graph(
    module: torch.nn.Module, inputs: Sequence[Any], table: dict[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """The joint forward and backward graph of `module` on `inputs`, by AOTAutograd.

    Placeholders and outputs carry `meta['desc']`; forward nodes `nn_module_stack`, backward nodes
    `fwd_nn_module_stack`. Raises whatever the module raises.
    """
    with contextlib.ExitStack() as stack, fx_traceback.preserve_node_meta():
        joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs), decompositions=table)
        return joint.graph_module


def boxed(module: torch.fx.GraphModule) -> Callable[[list[Any]], tuple]:
    """`module` as a function of one list, which it empties: inputs are freed after their last use."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    return torch.fx.GraphModule(module, graph)


def stealing(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`module` as a function of one list that torch.compile empties when it calls what it has compiled, so that inputs
    are freed after their last use there too."""
    graph, env = torch.fx.Graph(), {}
    given = graph.placeholder("inputs")
    for index, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        env[node] = graph.call_function(operator.getitem, (given, index))
    graph.output(graph.graph_copy(module.graph, env))
    found = torch.fx.GraphModule(module, graph)
    set_locals_to_steal(found, ["inputs"])
    return found

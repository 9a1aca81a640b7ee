from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from meshwright.passes import Captured, op_name
from meshwright.passes.graph import argument, tensor_args, value_of
from meshwright.passes.keeping import is_keep, readers_of
from meshwright.passes.naming import draws_random

from ..oracle import captured_values


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def canonical(function: Callable[..., Any], *inputs: torch.Tensor, **modules: nn.Module) -> Captured:
    """The captured function, after its outputs and gradients were compared with those of eager."""
    model = Function(function, **modules).double()
    torch.manual_seed(0)
    captured, values = captured_values(model, inputs, {})
    torch.manual_seed(0)
    out = model(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    for node, want in zip(captured.outputs, outs, strict=True):
        assert node is not None
        torch.testing.assert_close(values[node], want.detach(), rtol=1e-12, atol=1e-12)
    names = {**dict(model.named_parameters()), **{f"args.{i}": x for i, x in enumerate(inputs)}}
    learnt = {name: tensor for name, tensor in names.items() if tensor.requires_grad}
    tangents = [values[captured.tangents[i]] for i in captured.tangents]
    grads = torch.autograd.grad([outs[i] for i in captured.tangents], list(learnt.values()), tangents)
    for name, want in zip(learnt, grads, strict=True):
        torch.testing.assert_close(values[captured.grads[name]], want, rtol=1e-12, atol=1e-12)
    return captured


def forward(captured: Captured) -> list[str]:
    return [op_name(n) for n in computing(captured) if n not in captured.backward]


def computing(captured: Captured) -> list[fx.Node]:
    """The ops without those that only may keep a parameter."""
    return [n for n in captured.ops() if not is_keep(n)]


def every(captured: Captured) -> list[str]:
    return [op_name(n) for n in captured.ops()]


def equations(captured: Captured) -> list[str]:
    return [argument(n, 0) for n in captured.ops() if op_name(n) == "einsum"]


# Products


def test_a_linear_layer_over_batch_and_sequence_is_one_einsum_over_both() -> None:
    captured = canonical(lambda m, x: m.inner(x), real(2, 3, 4), inner=nn.Linear(4, 5))
    assert every(captured).count("reshape") <= 1  # the bias's gradient, from [1, 5]
    assert "permute" not in every(captured)
    assert forward(captured) == ["einsum", "add"]
    left, right = argument(computing(captured)[0], 1)
    assert captured.names[left] == "args.0"
    assert captured.names[right] == "inner.weight::keep"
    assert all(value_of(n).dim() != 2 or value_of(n).shape[0] != 6 for n in captured.ops())  # nothing is flattened


def test_a_chain_of_linear_layers_never_flattens() -> None:
    captured = canonical(
        lambda m, x: m.down(F.gelu(m.up(x))).sum(), real(2, 3, 4), up=nn.Linear(4, 6), down=nn.Linear(6, 4)
    )
    assert len(equations(captured)) == 6
    flattened = [n for n in captured.ops() if value_of(n).dim() == 2 and value_of(n).shape[0] == 6]
    assert {value_of(n).shape for n in flattened} <= {(6, 4)}  # the weight of `up` and its gradient
    assert {value_of(n).dim() for n in captured.ops() if op_name(n) == "reshape"} <= {1}  # biases' gradients


def test_operands_may_be_permuted() -> None:
    """The rows of the product are flattened from (1, 0), so its letters must come in that order."""
    captured = canonical(lambda m, x: m.inner(x.transpose(0, 1)), real(2, 3, 4), inner=nn.Linear(4, 5, bias=False))
    assert "reshape" not in every(captured)
    first = computing(captured)[0]
    assert op_name(first) == "einsum"
    assert captured.names[argument(first, 1)[0]] == "args.0"
    assert value_of(first).shape == (3, 2, 5)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.inner(x.permute(2, 0, 1, 3)),
        lambda m, x: m.inner(x.permute(1, 2, 0, 3).flatten(0, 1)),
        lambda m, x: m.inner(x.transpose(1, 2)).transpose(1, 2),
        lambda m, x: m.inner(x.reshape(6, 5, 4)),
        lambda m, x: m.inner(x[:, :1]),
        lambda m, x: m.inner(x).reshape(2, 3, 5, 2, 3),
        lambda m, x: x.flatten(0, 2) @ m.inner.weight.T,
        lambda m, x: torch.einsum("abcd,ed->ceab", x, m.inner.weight),
        lambda m, x: m.inner(x).mean(1),
    ],
)
def test_any_views_around_a_product(function: Callable[..., Any]) -> None:
    captured = canonical(function, real(2, 3, 5, 4), inner=nn.Linear(4, 6, bias=False))
    assert "mm" not in every(captured)


def test_a_batched_product_of_flattened_heads_keeps_batch_and_head_apart() -> None:
    captured = canonical(lambda m, q, k: q @ k.transpose(-1, -2), real(2, 3, 4, 5), real(2, 3, 6, 5))
    assert every(captured) == ["einsum"] * 3 + ["permute"]  # the gradient of `k`
    assert value_of(captured.ops()[0]).shape == (2, 3, 4, 6)


def test_a_plain_batched_product_stays() -> None:
    assert every(canonical(lambda m, x, y: torch.bmm(x, y), real(2, 3, 4), real(2, 4, 5)))[0] == "bmm"


def test_the_gradient_of_a_bias_is_summed_over_the_real_dims() -> None:
    captured = canonical(lambda m, x: m.inner(x), real(2, 3, 4), inner=nn.Linear(4, 5))
    sums = [n for n in captured.ops() if op_name(n) == "sum"]
    assert len(sums) == 1
    assert list(argument(sums[0], 1)) == [0, 1]
    assert value_of(tensor_args(sums[0])[0]).shape == (2, 3, 5)


def test_rows_may_be_summed_over_every_dim() -> None:
    canonical(lambda m, x: torch.sum(x.reshape(-1, 4), dim=None), real(2, 3, 4))
    canonical(lambda m, x: x.reshape(-1, 4).sum(0, keepdim=True), real(2, 3, 4))
    canonical(lambda m, x, y: x.reshape(-1, 4) * y + 2, real(2, 3, 4), real(4))


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2, 1), (1, 3)])
def test_a_product_with_a_bias_is_a_product_and_a_sum(alpha: int, beta: int) -> None:
    captured = canonical(
        lambda m, b, x, y: torch.addmm(b, x, y, alpha=alpha, beta=beta), real(5), real(3, 4), real(4, 5)
    )
    assert forward(captured).count("einsum") == 1
    assert forward(captured)[-1] == "add"


# Reductions, views, constants


def test_a_mean_is_a_sum_and_a_division() -> None:
    captured = canonical(lambda m, x: (x.mean(), x.mean(1), x.mean((0, 2), keepdim=True), x.mean([])), real(2, 3, 4))
    assert "mean" not in every(captured)
    assert forward(captured).count("sum") == forward(captured).count("div") == 4
    assert {argument(n, 1) for n in captured.ops() if op_name(n) == "div"} == {24, 3, 8}


def test_a_mean_in_another_dtype() -> None:
    captured, _ = captured_values(Function(lambda m, x: x.mean(0, dtype=torch.float64)), (torch.ones(3, 4),), {})
    assert [value_of(n).dtype for n in captured.ops()] == [torch.float64] * 2


def test_a_slice_of_everything_and_an_expansion_to_the_same_shape_go() -> None:
    captured = canonical(lambda m, x: x[:, :5].expand(2, 5)[0:2].expand(-1, -1).exp(), real(2, 5))
    assert forward(captured) == ["exp"]
    assert every(captured) == ["exp", "mul"]


def test_the_backward_of_a_slice_is_a_padding() -> None:
    captured = canonical(lambda m, x: x[:, 1:3] * 2, real(2, 5))
    assert every(captured) == ["slice", "mul", "mul", "constant_pad_nd"]
    pad = captured.ops()[-1]
    assert list(argument(pad, 1)) == [1, 2]


@pytest.mark.parametrize("index", [slice(None), slice(-2, None), slice(0, 100), slice(1, -1), slice(None, None, 2)])
def test_slices_of_any_kind(index: slice) -> None:
    captured = canonical(lambda m, x: x[:, index].exp(), real(2, 5))
    assert "slice_backward" not in every(captured)


def test_split_and_unbind_are_slices_and_selections() -> None:
    captured = canonical(lambda m, x: (*x.split(2, 1), *x.chunk(3, -1), *x.unbind(0)), real(2, 6))
    assert set(forward(captured)) == {"slice", "select"}
    assert "getitem" not in every(captured)


def test_views_of_views_become_one_and_noise_goes() -> None:
    captured = canonical(lambda m, x: x.view(2, 12).reshape(6, 4).clone().contiguous().view(4, 6).exp(), real(2, 3, 4))
    assert forward(captured) == ["reshape", "exp"]
    captured = canonical(lambda m, x: x.transpose(0, 1).permute(1, 0, 2).exp(), real(2, 3, 4))
    assert forward(captured) == ["exp"]
    captured = canonical(lambda m, x: (x * 1).pow(1).div(1).exp(), real(2, 3))
    assert forward(captured) == ["exp"]


def test_constants_depend_on_nothing() -> None:
    captured = canonical(
        lambda m, x: x + torch.zeros_like(x) + x.new_ones(3) + torch.full_like(x, 2) + torch.empty(3).fill_(4),
        real(2, 3),
    )
    constants = [n for n in captured.ops() if op_name(n) == "full"]
    assert len(constants) == 4
    assert not [n for n in constants if n.all_input_nodes]
    assert not {"zeros_like", "new_ones", "full_like", "empty"} & set(every(captured))


def test_integer_products_keep_their_dtype() -> None:
    captured, values = captured_values(Function(lambda m, k: (k * 1.0, k / 1, k * 1)), (torch.arange(3),), {})
    assert [values[n].dtype for n in captured.outputs if n is not None] == [torch.float32, torch.float32, torch.int64]


def test_conjugation_and_negation_of_views_and_numbers() -> None:
    x = torch.randn(3, 2, dtype=torch.complex128, requires_grad=True)
    canonical(lambda m, x: (x.conj() * (1 + 2j)).imag.sum() + x.mH.real.sum(), x)


def test_a_strided_view_of_a_whole_tensor_is_a_reshape() -> None:
    captured = canonical(lambda m, x: x.as_strided((6, 4), (4, 1)).exp(), real(2, 3, 4))
    assert forward(captured) == ["reshape", "exp"]


# Random numbers


def test_the_mask_of_a_dropout_is_drawn_independent_of_data() -> None:
    captured = canonical(lambda m, x: F.dropout(x.sin(), 0.3), real(4, 5))
    assert "native_dropout" not in every(captured)
    (draw,) = [n for n in captured.ops() if draws_random(n)]
    (blank,) = draw.all_input_nodes
    assert op_name(blank) == "empty_strided"
    assert not blank.all_input_nodes
    assert {op_name(user) for user in draw.users} == {"mul", "_to_copy"}
    assert draw not in captured.backward


@pytest.mark.parametrize("drop", [lambda x: F.dropout(x, 0.0), lambda x: F.dropout(x, 0.5, training=False)])
def test_a_dropout_that_keeps_everything_goes(drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not [n for n in canonical(lambda m, x: drop(x.sin()), real(4, 5)).ops() if draws_random(n)]


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, lambda x: torch.bernoulli(x.sigmoid())])
def test_other_draws_depend_on_shapes_alone_or_on_probabilities(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    captured = canonical(lambda m, x: x * draw(x.detach()), real(4, 5))
    assert len([n for n in captured.ops() if draws_random(n)]) == 1


def test_draws_come_in_the_order_of_eager() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = F.dropout(m.inner(x).sin(), 0.3) + torch.rand(3, 4, dtype=x.dtype) + torch.randn_like(x)
        return x

    canonical(run, real(3, 4), inner=nn.Linear(4, 4))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: x * torch.rand_like(x.detach()),
        lambda x: x * torch.bernoulli(x.sigmoid()),
        lambda x: x * torch.bernoulli(x.detach(), 0.5),
        lambda x: x * torch.empty_like(x).uniform_(),
        lambda x: x * torch.empty_like(x).exponential_(),
        lambda x: x + torch.empty_like(x).normal_(0.0, 2.0),
    ],
    ids=["dropout", "rand_like", "probabilities", "like", "uniform_", "exponential_", "normal_"],
)
def test_draws_for_a_permuted_tensor_fill_its_memory_in_order(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    canonical(lambda m, x: draw(m.inner(x).permute(2, 0, 1)), real(2, 3, 4), inner=nn.Linear(4, 4))


# The backward


def test_a_view_of_a_parameter_is_repeated_for_the_backward() -> None:
    """So that a parameter gathered for the forward need not be kept for the backward."""
    captured = canonical(lambda m, x: x @ m.inner.weight.reshape(3, 8), real(2, 3), inner=nn.Linear(4, 6, bias=False))
    assert readers(captured, "inner.weight", "reshape") == [False, True]
    model = Function(lambda m, x: m.inner(x).sum(), inner=nn.Linear(4, 6, bias=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured, _ = captured_values(model, (torch.randn(2, 4, requires_grad=True),), {})
    assert readers(captured, "inner.weight", "_to_copy") == [False, True]


def readers(captured: Captured, name: str, op: str) -> list[bool]:
    """Whether each `op` that reads the source `name` is in the backward."""
    source = next(n for n, s in captured.sources.items() if s.name == name)
    return sorted(user in captured.backward for user in readers_of(source) if op_name(user) == op)


def test_the_backward_is_what_no_output_needs() -> None:
    captured = canonical(lambda m, x: m.inner(x).exp(), real(2, 4), inner=nn.Linear(4, 5))
    needed: set[fx.Node] = set()
    stack = [n for n in captured.outputs if n is not None]
    while stack:
        node = stack.pop()
        needed.add(node)
        stack.extend(node.all_input_nodes)
    assert captured.backward == set(captured.ops()) - needed

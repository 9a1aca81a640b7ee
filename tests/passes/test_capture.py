from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from meshwright.passes import Captured, capture, op_name
from meshwright.passes._torch import FakeTensorMode
from meshwright.passes.trees import flatten
from meshwright.plans.errors import CaptureError

from ..oracle import captured_values
from .eager import Function, assert_equal_to_eager, layer, ops, real


def named_inputs(captured: Captured) -> list[str]:
    return [s.name for s in captured.sources.values() if s.kind == "input"]


# Parameters and buffers


def test_a_tied_parameter_has_one_name_and_one_gradient() -> None:
    model = nn.Sequential(OrderedDict(first=layer(), middle=nn.Tanh(), last=layer()))
    model.last.weight = model.first.weight
    captured = assert_equal_to_eager(model, (real(3, 4),))
    assert captured.aliases == {"last.weight": "first.weight"}
    assert set(captured.grads) == {"first.weight", "first.bias", "last.bias"}


def test_a_module_under_two_names_is_captured_once() -> None:
    shared = layer()
    captured = assert_equal_to_eager(Function(lambda m, x: m.b(m.a(x).sin()), a=shared, b=shared), (real(3, 4),))
    assert captured.aliases == {"b.weight": "a.weight", "b.bias": "a.bias"}
    assert {captured.names[n].split("::")[0] for n in captured.ops() if op_name(n) == "einsum"} == {"a"}


def test_unused_and_frozen_parameters_get_no_gradient() -> None:
    model = Function(lambda m, x: m.used(m.frozen(x)), used=layer(), frozen=layer(), unused=layer())
    model.frozen.requires_grad_(False)
    captured = assert_equal_to_eager(model, (real(3, 4),))
    assert set(captured.grads) == {"used.weight", "used.bias"}
    held = {s.name: s for s in captured.sources.values()}
    assert not held["frozen.weight"].requires_grad
    assert held["unused.weight"].shape == (4, 4)


def test_a_detached_branch_and_a_no_grad_region_give_no_gradient() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = m.quiet(x).tanh()
        return m.loud(x) * scale + m.cut(x).detach()

    captured = assert_equal_to_eager(Function(run, quiet=layer(), loud=layer(), cut=layer()), (real(3, 4),))
    assert set(captured.grads) == {"loud.weight", "loud.bias"}


def test_mutated_buffers_are_results() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.norm(x) * self.steps

    captured = assert_equal_to_eager(Counter(), (real(5, 4),))
    assert set(captured.mutations) == {
        "steps",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_a_buffer_that_is_replaced_is_a_mutated_one() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y - self.mean

    assert set(assert_equal_to_eager(Average(), (real(3, 4),)).mutations) == {"mean"}


def test_a_buffer_must_keep_its_shape() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2, 4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x])
            return self.seen.sum()

    with pytest.raises(
        CaptureError, match=r"must keep shape and dtype of its buffers, got \(5, 4\) .* for seen of \(2, 4\)"
    ):
        capture(Cache(), (real(3, 4),))


def test_a_tensor_attribute_is_a_constant_and_is_not_copied() -> None:
    model = Function(lambda m, x: x * m.scale)
    model.scale = real(4)
    captured = assert_equal_to_eager(model, (real(3, 4),))
    assert [(s.kind, s.name) for s in captured.sources.values()] == [("constant", "scale"), ("input", "args.0")]


@pytest.mark.parametrize("mutate", [lambda w: w.mul_(0.5), lambda w: w[0].zero_()], ids=["whole", "view"])
def test_a_mutated_parameter_is_refused_by_name(mutate: Callable[[torch.Tensor], Any]) -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mutate(m.inner.weight)
        return m.inner(x)

    with pytest.raises(
        CaptureError, match=r"must not mutate a parameter.*got a mutated inner\.weight; make it a buffer"
    ):
        capture(Function(run, inner=layer()), (real(3, 4),))


# Inputs and outputs


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None
    loss: torch.Tensor | None = None


def test_nested_inputs_are_named_by_where_they_are() -> None:
    def run(m: Any, pair: Pair, batch: dict[str, Any], *, scale: list[torch.Tensor], flag: bool) -> torch.Tensor:
        assert flag
        return (pair.left + batch["inner"][0]) * scale[1] - pair.right + batch["number"]

    args = (Pair(real(3), real(3) * 2), {"inner": (real(3) * 3, None), "number": 4})
    captured = assert_equal_to_eager(Function(run), args, {"scale": [real(3), real(3) + 1], "flag": True})
    assert named_inputs(captured) == [
        "args.0.left",
        "args.0.right",
        "args.1.inner.0",
        "kwargs.scale.0",
        "kwargs.scale.1",
    ]
    assert ("kwargs.flag", True) in captured.input_tree.constants


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda y: y, ["output"]),
        (lambda y: (y, [y + 1]), ["output.0", "output.1.0"]),
        (lambda y: {"a": y, "b": None, 3: y.sum()}, ["output.a", "output.3"]),
        (lambda y: OrderedDict([(0, y), ("z", y * 2)]), ["output.0", "output.z"]),
        (lambda y: Answer(y, (y * 2,)), ["output.logits", "output.hidden.0"]),
        (lambda y: Pair(y, y.exp()), ["output.left", "output.right"]),
        (lambda y: (None, y, 5, "text"), ["output.1"]),
    ],
    ids=["tensor", "tuple", "dict", "ordered", "dataclass", "named", "none"],
)
def test_outputs_of_any_shape_are_built_again(wrap: Callable[[torch.Tensor], Any], names: list[str]) -> None:
    model = Function(lambda m, x: wrap(m.inner(x)), inner=layer())
    captured = assert_equal_to_eager(model, (real(3, 4),))
    assert list(captured.output_tree.names) == names
    like = model(real(3, 4))
    built = captured.output_tree.build(flatten(like, what="output")[0])
    assert type(built) is type(like)
    assert str(built) == str(like)


def test_an_object_that_hides_tensors_is_refused_by_its_path() -> None:
    class Opaque:
        def __init__(self) -> None:
            self.tensor = real(3)

    model = Function(lambda m, x: x["held"].tensor)
    with pytest.raises(CaptureError, match=r"'input' must consist of tensors.*got Opaque at input\.0\.0\.held"):
        capture(model, ({"held": Opaque()},))


def test_an_input_that_requires_a_gradient_gets_one() -> None:
    x, y = real(3, 4).requires_grad_(), real(3, 4)
    captured, values = captured_values(Function(lambda m, x, y: m.inner(x * y), inner=layer()), (x, y), {})
    assert set(captured.grads) == {"args.0", "inner.weight", "inner.bias"}
    assert values[captured.grads["args.0"]].shape == (3, 4)


def test_an_unused_output_branch_has_no_tangent_where_it_cannot_learn() -> None:
    captured = assert_equal_to_eager(
        Function(lambda m, x: (m.inner(x), x.argmax(1), m.inner(x).detach()), inner=layer()), (real(3, 4),)
    )
    assert list(captured.tangents) == [0]


@pytest.mark.parametrize("kind", ["real", "meta", "fake"])
def test_only_shapes_and_dtypes_of_inputs_count(kind: str) -> None:
    model = Function(lambda m, x, k: m.inner(x)[k], inner=layer())
    x, k = real(3, 4), torch.tensor([2, 0])
    if kind == "meta":
        x, k = x.to("meta"), k.to("meta")
    if kind == "fake":
        mode = FakeTensorMode()
        x, k = mode.from_tensor(x), mode.from_tensor(k)
    names = list(capture(model, (x, k)).names.values())
    assert names == list(capture(model, (real(3, 4), torch.tensor([0, 0]))).names.values())


def test_a_loss_becomes_part_of_the_program() -> None:
    model = Function(lambda m, x: {"y": m.inner(x)}, inner=layer())
    captured = capture(model, (real(3, 4),), loss=lambda out: out["y"].square().mean())
    assert captured.output_tree.names == ("output",)
    assert [tuple(n.meta["val"].shape) for n in captured.outputs if n is not None] == [()]


# What tracing must not lose


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        return -ctx.factor * grad * saved, None


def test_a_custom_function_keeps_its_backward() -> None:
    assert_equal_to_eager(Function(lambda m, x: Reversed.apply(m.inner(x), 0.3), inner=layer()), (real(3, 4),))


def test_capture_leaves_the_random_state_alone() -> None:
    model = nn.Sequential(layer(), nn.Dropout(0.5))
    before = torch.random.get_rng_state()
    capture(model, (real(3, 4),))
    assert torch.equal(before, torch.random.get_rng_state())


def test_hooks_of_tensors_and_modules_run() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = m.inner(x)
        hidden.register_hook(lambda grad: grad * 3)
        return hidden.tanh()

    model = Function(run, inner=layer())
    model.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model.inner.register_forward_hook(lambda module, inputs, output: output + 1)
    captured = assert_equal_to_eager(model, (real(3, 4),))
    assert ops(captured, backward=True).count("mul") >= 1
    assert len(model.inner._forward_hooks) == 1  # ours are on a copy


def test_autocast_casts_as_in_eager() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.inner(x).float().square()

    captured = assert_equal_to_eager(Function(run, inner=nn.Linear(4, 4)), (torch.randn(3, 4),), tolerance=1e-2)
    products = [n for n in captured.ops() if op_name(n) == "einsum"]
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}


def test_parameters_of_mixed_dtypes_get_gradients_of_theirs() -> None:
    model = Function(
        lambda m, x: m.wide(m.narrow(x.bfloat16()).double()),
        narrow=nn.Linear(4, 4, dtype=torch.bfloat16),
        wide=layer(),
    )
    captured = assert_equal_to_eager(model, (real(3, 4),), tolerance=1e-2)
    dtypes = {name: node.meta["val"].dtype for name, node in captured.grads.items()}
    assert dtypes["narrow.weight"] == torch.bfloat16
    assert dtypes["wide.weight"] == torch.float64


def test_complex_parameters_and_numbers() -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.view_as_complex(real(4, 2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(x * self.phase * (1 + 2j)).sum(-1)

    assert_equal_to_eager(Rotation(), (torch.view_as_complex(real(3, 4, 2)),))


def test_a_model_may_catch_what_its_modules_raise() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            x = m.broken(x)
        except ZeroDivisionError:
            pass
        return m.inner(x) * 2

    def fail(m: Any, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    captured = assert_equal_to_eager(Function(run, broken=Function(fail), inner=layer()), (real(3, 4),))
    assert "inner::einsum.0" in captured.names.values()


# Refusals


def test_data_dependent_control_flow_is_refused_with_module_line_and_way_out() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x  # the line to be named

    model = nn.Sequential(layer(), Function(lambda m, x: m.inner(x), inner=Function(run)))
    with pytest.raises(CaptureError) as error:
        capture(model, (real(3, 4).to("meta"),))
    message = str(error.value)
    assert "'model' must not read values of tensors while it runs" in message
    assert "in 1.inner at test_capture.py:" in message
    assert "if x.sum() > 0 else x" in message
    assert "torch.where" in message


@pytest.mark.parametrize(
    "function",
    [lambda m, x: x[x > 0], lambda m, x: x * x.max().item(), lambda m, x: x.nonzero()],
    ids=["mask", "item", "nonzero"],
)
def test_shapes_and_numbers_that_depend_on_values_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"must not read values.*in the root module at test_capture\.py:\d+"):
        capture(Function(function), (real(3, 4),))


def test_what_the_model_raises_is_told_with_its_place() -> None:
    model = nn.Sequential(layer(), Function(lambda m, x: x @ real(3, 5)))
    with pytest.raises(CaptureError, match=r"'model' must be traceable, got RuntimeError: .* in 1 at test_capture\.py"):
        capture(model, (real(3, 4),))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = layer()
    model.stream = (line for line in "text")
    with pytest.raises(CaptureError, match="'model' must be deep-copyable, got TypeError: cannot pickle 'generator'"):
        capture(model, (real(3, 4),))


def test_the_model_itself_is_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), layer())
    before = copy.deepcopy(model.state_dict())
    capture(model, (real(3, 4),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks

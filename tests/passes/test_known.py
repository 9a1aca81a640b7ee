"""Values known while tracing: constants are computed, what was read of the example becomes a guard."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import meshwright
from meshwright.passes import Captured, capture, op_name
from meshwright.plans.errors import CaptureError

from .eager import Function, assert_equal_to_eager, layer, real


def guards(captured: Captured) -> list[str]:
    return [name for name in captured.output_tree.names if name.startswith("guard")]


def rebuilt(captured: Captured, *inputs: torch.Tensor) -> Any:
    """The outputs of a capture without weights on other inputs, built as the model would give them."""
    env: dict[Any, Any] = {}
    feed = iter(inputs)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = getattr(captured.module, node.target)
        elif node.op == "call_function" and node not in captured.backward:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
    return captured.output_tree.build([env[n] for n in captured.outputs])


# Constants


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.inner(x) if torch.ones(3).sum() > 2 else x,
        lambda m, x: m.inner(x) * torch.arange(5).max().item(),
        lambda m, x: m.inner(x)[torch.tensor([True, False, True])],
        lambda m, x: m.inner(x)[(torch.ones_like(x[:, 0]).cumsum(0) > 1).nonzero().flatten()],
        lambda m, x: m.inner(x).masked_select(torch.eye(3, 4, dtype=torch.bool)),
        lambda m, x: m.inner(x).repeat_interleave(torch.tensor([1, 2, 0]), 0),
    ],
    ids=["branch", "number", "mask", "nonzero", "masked_select", "repeat_interleave"],
)
def test_what_depends_on_constants_alone_is_known(function: Callable[..., Any]) -> None:
    captured = assert_equal_to_eager(Function(function, inner=layer()), (real(3, 4),))
    assert not guards(captured)


def test_a_constant_that_was_written_to_is_still_known() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.zeros(2, dtype=torch.int64)
        sizes[0] = 1
        sizes += 1
        return m.inner(x)[: sizes.tolist()[0]]

    assert not guards(assert_equal_to_eager(Function(run, inner=layer()), (real(3, 4),)))


# The example


def test_a_branch_follows_the_example_and_is_guarded() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    model = Function(run)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    captured = assert_equal_to_eager(model, (x,))
    assert guards(captured) == ["guard.0"]
    assert torch.equal(rebuilt(captured, x + 1), (x + 1) * 2)
    with pytest.raises(
        CaptureError, match=r"'inputs' must give the model what it read.*at test_known.py:\d+ \(return x"
    ):
        rebuilt(captured, -x)


def test_a_check_that_raises_in_eager_mode_is_a_guard() -> None:
    def run(m: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 5:
            raise ValueError("too large")
        return m.inner(x) * labels

    assert len(guards(assert_equal_to_eager(Function(run, inner=layer()), (real(3, 4), torch.arange(4))))) == 1


def test_a_shape_may_depend_on_integer_inputs() -> None:
    def run(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return m.inner(x)[mask]

    model = Function(run)
    model.inner = nn.Identity()
    mask = torch.tensor([True, False, True])
    x = real(3, 4)
    captured = assert_equal_to_eager(model, (x, mask))
    assert guards(captured)
    assert torch.equal(rebuilt(captured, x, mask.roll(1)), x[mask.roll(1)])
    with pytest.raises(CaptureError, match="'inputs' must give the model what it read"):
        rebuilt(captured, x, torch.tensor([True, False, False]))


def test_a_number_may_depend_on_integer_inputs() -> None:
    captured = assert_equal_to_eager(
        Function(lambda m, x, n: x[:, : n.tolist()[1]] * 2), (real(3, 4), torch.tensor([1, 3]))
    )
    assert len(guards(captured)) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.inner(x)[torch.rand(3) > 0.5],
        lambda m, x: m.inner(x) if torch.rand([]) < 0.5 else x,
        lambda m, x: m.inner(x)[m.inner(x)[:, 0].argsort() > 0],
    ],
    ids=["drawn mask", "drawn branch", "learnt mask"],
)
def test_draws_and_learnt_values_are_not_read(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"must not read values.*test_known\.py:\d+"):
        capture(Function(function, inner=layer()), (real(3, 4),))


def test_without_values_a_branch_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"must not read values.*test_known\.py:\d+"):
        capture(Function(lambda m, x: x * 2 if x.sum() > 0 else x), (torch.empty(3, device="meta"),))


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["random", "numpy"])
def test_draws_that_a_trace_cannot_see_are_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match="must draw random numbers by torch alone"):
        capture(Function(lambda m, x: x * draw()), (real(3),))


def test_library_code_that_cannot_be_told_of_the_trace_runs_as_in_eager_mode() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("no path for this")
        return m.inner(x)

    assert_equal_to_eager(Function(run, inner=layer()), (real(3, 4),))


def test_a_guarded_model_trains_on_ranks() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            if not torch.isfinite(h).all():
                h = h.clamp(-1, 1)
            return h[mask].square().mean()

    torch.manual_seed(0)
    inputs = (torch.randn(4, 6), torch.tensor([True, True, False, True]))
    for seed in (1, 2):
        report = meshwright.check(Checked(), inputs, mesh="2", random=1, seed=seed)
        assert report.equal, report.differences
    assert op_name(capture(Checked(), inputs).outputs[1]) == "ne"  # type: ignore[arg-type]

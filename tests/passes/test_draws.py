"""Checkpointed regions are computed again in the backward, and see the random numbers that they saw first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.passes import capture, op_name
from meshwright.passes.naming import draws_random
from meshwright.plans.errors import CaptureError

from .eager import Function, assert_equal_to_eager, layer, ops, real


def test_a_checkpointed_region_is_computed_again_in_the_backward() -> None:
    def block(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(m.a(x).sin().exp())

    plain = Function(block, a=layer(), b=layer())
    again = Function(lambda m, x: checkpoint(block, m, x, use_reentrant=False), a=layer(), b=layer())
    assert "sin" not in ops(assert_equal_to_eager(plain, (real(3, 4),)), backward=True)
    captured = assert_equal_to_eager(again, (real(3, 4),))
    assert {"sin", "exp"} <= set(ops(captured, backward=True))
    assert ops(captured, backward=False).count("sin") == 1


def test_recomputed_nodes_are_named_by_the_module_they_repeat() -> None:
    def region(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(m.a(x).sin().exp())

    model = Function(lambda m, x: checkpoint(region, m, x, use_reentrant=False), a=layer(), b=layer())
    names = set(capture(model, (real(3, 4),)).names.values())
    assert {"a::einsum.0", "::sin.0", "::exp.0", "b::einsum.0"} <= names
    assert {"a::bwd.einsum.0", "a::bwd.add.0", "::bwd.sin.0", "::bwd.exp.0"} <= names


def test_a_reentrant_checkpoint_computes_again_and_gives_what_eager_gives() -> None:
    def block(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.a(x).sin().exp()

    model = Function(lambda m, x: m.b(checkpoint(block, m, m.b(x), use_reentrant=True)), a=layer(4, 4), b=layer(4, 4))
    captured = assert_equal_to_eager(model, (real(3, 4),))
    assert {"sin", "exp"} <= set(ops(captured, backward=True))


def test_a_reentrant_checkpoint_of_what_takes_no_gradient_gives_none() -> None:
    model = Function(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)), a=layer(4, 4), b=layer(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that there will be none
        captured = assert_equal_to_eager(model, (real(3, 4).detach(),))
    assert set(captured.grads) == {"b.weight", "b.bias"}


def drop_path(x: torch.Tensor, keep: float = 0.6) -> torch.Tensor:
    """Stochastic depth: a mask that is drawn for a shape alone."""
    return x * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(keep).div_(keep)


def dropped(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.drop(m.a(x).sin()).exp())


def dropped_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.dropout(m.a(x), 0.3).sin() + F.dropout(m.b(x), 0.4), 0.2).tanh()


def dropped_paths(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + m.path(m.a(x).sin())
    return x + m.path(m.b(x).sin())


def dropped_by_function(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + drop_path(m.a(x).sin()) + drop_path(m.b(x).cos())


@pytest.mark.parametrize(
    "region", [dropped, dropped_twice, dropped_paths, dropped_by_function], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_a_checkpointed_region_repeats_its_random_draws(region: Callable[..., Any], shared: bool, nested: bool) -> None:
    """Eager restores the random state: the backward must see the masks of the forward, whatever is computed again."""

    def block() -> nn.Module:
        return Function(region, a=layer(), b=layer(), drop=nn.Dropout(0.4), path=Function(lambda m, x: drop_path(x)))

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for part in (m.first, m.second, m.third):
            x = checkpoint(part, x, use_reentrant=False)
        return x

    first = block()
    others = {"second": first, "third": first} if shared else {"second": block(), "third": block()}
    model: nn.Module = Function(run, first=first, **others)
    if nested:
        model = Function(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=model)
    if nested and region in (dropped_paths, dropped_by_function):  # several alike, and repeated twice
        with pytest.raises(CaptureError, match="must tell its random draws apart"):
            capture(model, (real(6, 4),))
        return
    captured = assert_equal_to_eager(model, (real(6, 4),))
    drawn = [op_name(n) for n in captured.ops() if draws_random(n)]
    assert len(drawn) == 3 * {dropped: 1, dropped_twice: 3, dropped_paths: 2, dropped_by_function: 2}[region]
    assert not [n for n in captured.backward if draws_random(n)]
    assert "einsum" in ops(captured, backward=True)


def test_draws_that_cannot_be_told_apart_are_refused() -> None:
    def region(m: Any, x: torch.Tensor) -> torch.Tensor:
        return drop_path(m.inner(x).sin())

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return drop_path(checkpoint(region, m, x, use_reentrant=False).tanh())

    message = r"'model' must tell its random draws apart .* got 1 repetitions of 2 equal draws of bernoulli in the root"
    with pytest.raises(CaptureError, match=message):
        capture(Function(run, inner=layer()), (real(6, 4),))

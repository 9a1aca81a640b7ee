"""Small modules of bare PyTorch equal the single process under random plans and the chosen one."""

from __future__ import annotations

import pytest
import torch

from meshwright.passes import capture
from meshwright.passes.naming import op_name
from meshwright.planner.checking.verify import check

from .operations import OPERATIONS

# One of some kinds: packed sequences, an operator with branches, linear algebra.
QUICK = ("rnn-packed", "cond", "cholesky")
MESHES = ("2", "3", "2x2")

pytestmark = pytest.mark.filterwarnings("ignore")


def equal(name: str, mesh: str, **options: object) -> None:
    torch.manual_seed(0)
    model, args, kwargs = OPERATIONS[name]()
    report = check(model, args, kwargs, mesh=mesh, steps=2, **options)  # type: ignore[arg-type]
    assert report.equal, report.differences


@pytest.mark.parametrize("name", QUICK)
def test_a_random_plan_equals_one_process(name: str) -> None:
    equal(name, "3", random=1, seed=11)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_random_plans_equal_one_process(name: str, mesh: str) -> None:
    equal(name, mesh, random=2, seed=11)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_chosen_plan_equals_one_process(name: str, mesh: str) -> None:
    equal(name, mesh, time_limit_s=4.0)


def test_recurrent_layers_keep_their_dropout() -> None:
    """PyTorch's decomposition forgets it."""
    captured = capture(torch.nn.RNN(4, 6, 2, dropout=0.2), (torch.randn(1, 3, 4),))
    assert [op_name(n) for n in captured.ops()].count("bernoulli") == 1


def test_flexible_attention_has_a_backward() -> None:
    """Which it has not on a CPU when it runs outside of a capture."""
    from torch.nn.attention.flex_attention import flex_attention

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j))  # type: ignore[return-value]

    captured = capture(Attend(), (torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(4, requires_grad=True)))
    assert len(captured.grads) == 2

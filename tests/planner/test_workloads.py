"""A planned step as a function of its workload equals what a new capture at those sizes is priced at."""

from __future__ import annotations

import time

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.cost_models import gemm_s, load_device
from meshwright.cost_models.kernels import attention_flops
from meshwright.cost_models.workload import Workload
from meshwright.planner.adapt import reprice
from meshwright.planner.api import plan
from meshwright.planner.detector import StagePredictor, workload, workload_prior
from meshwright.planner.workloads import workload_of
from meshwright.plans.errors import RequestError
from meshwright.plans.plan import Plan

WIDTH, HEADS = 1024, 8
DYNAMIC = {"x": {0: (2, 4096), 1: (2, 65536)}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.norm(x)
        q, k, v = (f(y).reshape(b, s, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.out(mixed.transpose(1, 2).reshape(b, s, WIDTH))).square().mean()


def call(batch: int, length: int) -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        return Block().bfloat16(), (torch.empty(batch, length, WIDTH, dtype=torch.bfloat16),)


def named(dynamic: object) -> Plan:
    return plan(*call(8, 512), cluster="h100-sxm:4", mesh="2x2", recipe="fsdp+tp", recompute="none", dynamic=dynamic)


@pytest.fixture(scope="module")
def made() -> tuple[Plan, Workload]:
    found = named({"x": {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("seq", min=2)}})
    model, args = call(8, 512)
    return found, workload_of(found, model, args, dynamic=found.options.dynamic, sequence="seq")


def test_it_equals_a_new_capture_at_any_size(made: tuple[Plan, Workload]) -> None:
    found, workload = made
    assert workload.symbols == ("batch", "seq") and workload.moves
    assert workload.seconds(batch=8, seq=512) == pytest.approx(found.predicted.step_time_s, rel=1e-12)
    model, args = call(5, 333)  # pieces are uneven
    again = reprice(found, model, args).predicted.step_time_s
    assert workload.seconds(batch=5, seq=333) == pytest.approx(again, rel=1e-9)


def test_many_micro_batches_at_once_are_those_one_by_one(made: tuple[Plan, Workload]) -> None:
    _, workload = made
    lengths = np.arange(256, 4352, 256)
    together = workload.seconds(batch=8, seq=lengths)
    assert together == pytest.approx([workload.seconds(batch=8, seq=float(n)) for n in lengths], rel=1e-12)
    began = time.process_time()
    workload.seconds(batch=8, seq=np.tile(lengths, 20))
    assert (time.process_time() - began) / (20 * len(lengths)) < 1e-3


def test_packed_sequences_pay_attention_one_by_one(made: tuple[Plan, Workload]) -> None:
    _, workload = made
    whole = workload.seconds(batch=2, seq=4096)
    assert workload.packed_s([4096], batch=2) == pytest.approx(whole, rel=1e-12)
    assert workload.packed_s([2048, 2048], batch=2) < whole
    assert workload.packed_s([1024, 3072], batch=2) == pytest.approx(workload.packed_s([3072, 1024], batch=2))


def test_flop_and_bytes_are_expressions_in_tokens_and_squares(made: tuple[Plan, Workload]) -> None:
    _, workload = made
    batch, seq = sympy.symbols("batch seq", integer=True, positive=True)
    # A quarter of the heads' and products' work each: the batch is in two, the weights are in two.
    products = 6 * WIDTH * 4 * WIDTH * batch * seq
    head = WIDTH // HEADS
    pairs = sum(attention_flops(1, HEADS, 1, 1, head, causal=False, backward=back) for back in (False, True))
    expected = (products + pairs * batch * seq**2 / 2) / 4
    at = {batch: 8, seq: 512}
    assert float(workload.flops().subs(at)) == pytest.approx(float(expected.subs(at)), rel=1e-6)
    assert float(workload.moved_bytes().subs(at)) > 8 * 512 * WIDTH * 2


def test_an_op_is_an_expression_of_price_functions(made: tuple[Plan, Workload]) -> None:
    _, workload = made
    name, line, _ = next(op for op in workload.ops if op[0].startswith("q::einsum"))
    text = str(workload.expression(name))
    assert "gemm_s(" in text and "batch" in text and "seq" in text
    (at, often), *_ = workload.lines[line].parts
    sizes = [float(sympy.sympify(s).subs({"batch": 8, "seq": 512})) for s in map(str, workload.primitives[at].sizes)]
    assert often == 1 and gemm_s(load_device("h100-sxm"), *sizes[:3]) > 0


@pytest.mark.parametrize("sizes", [{}, {"batch": 1}, {"batch": 1, "seq": 1, "more": 1}])
def test_sizes_must_be_those_of_the_symbols(made: tuple[Plan, Workload], sizes: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="'sizes' must give batch, seq"):
        made[1].seconds(**sizes)
    with pytest.raises(RequestError, match="'lengths'"):
        made[1].packed_s([3, 0], batch=1)


def test_a_detector_starts_from_a_priced_step(made: tuple[Plan, Workload]) -> None:
    """Packings that the coefficients were not taken from come out within a few per cent."""
    _, priced = made
    prior = workload_prior(priced, np.array([[0.3], [0.6]]), tokens=16384, batch=8)
    assert prior.shape == (2, 1, 2) and (prior > 0).all() and prior[1] == pytest.approx(2 * prior[0])
    for pack in ([12000, 4384], [5000, 5000, 6384], [2048] * 8):
        told = StagePredictor(2, 1, prior=prior).times(np.array(workload(pack))[None, None]).sum()
        assert told == pytest.approx(0.9 * priced.packed_s(pack, batch=8), rel=0.05), pack
    with pytest.raises(RequestError, match="shares"):
        workload_prior(priced, np.ones((2, 2)), tokens=16384, batch=8)
    with pytest.raises(RequestError, match="at least 8"):
        workload_prior(priced, np.ones((1, 1)), tokens=4, batch=8)

"""How the price of an op comes about: its terms add up to what the plan says, every parameter has a source."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.cost_models import Calibration
from meshwright.cost_models.calibration import Machine, Quantity
from meshwright.planner.api import plan
from meshwright.planner.explaining.price_notes import price_of
from meshwright.plans.errors import RequestError
from meshwright.plans.plan import Plan

INPUT = (torch.randn(64, 256),)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64))


def made(calibration: Calibration | None = None) -> Plan:
    return plan(model(), INPUT, cluster="cpu:2", mesh="2", recipe="fsdp", compiled=False, calibration=calibration)


def test_terms_add_up_to_the_price_in_the_plan() -> None:
    found = made()
    for node in found.nodes:
        if node.op in ("einsum", "gelu", "add", "sum", "gelu_backward"):
            note = price_of(found, node.name, model(), INPUT)
            assert note.seconds == pytest.approx(node.time_s, rel=1e-12)
            assert sum(t.seconds for t in note.compute) + note.host_s == pytest.approx(note.seconds, rel=1e-12)
            moved = sum(term.seconds for term in note.moves)
            assert moved == pytest.approx(sum(edge.time_s for edge in node.inputs), rel=0.1, abs=1e-8)
            terms = (*note.compute, *note.moves)
            assert all(p.source for term in terms for p in term.parameters)
            assert all(term.uncertainty > 0 for term in terms)


def test_a_measured_parameter_cites_the_calibration() -> None:
    quantity = Quantity(name="product.float32.flops_per_s", value=1e11, unit="FLOP/s", uncertainty=0.07, samples=9)
    machine = Machine(processor="any", threads=1, ranks=2, load=0.0)
    here = Calibration(
        meshwright_version="0", torch_version="2", name="here", sheet="cpu", machine=machine, quantities=(quantity,),
        families=(), samples=(),
    )  # fmt: skip
    name = next(node.name for node in made().nodes if node.op == "einsum")
    text = str(price_of(made(here), name, model(), INPUT, calibration=here))
    assert f"calibration here {here.digest()[:12]}, +- 7% of 9 samples" in text and "m 32, n 512" in text
    with pytest.raises(RequestError, match="'calibration' must be the one that the plan cites"):
        price_of(made(here), name, model(), INPUT)


def test_a_name_that_is_no_op_is_refused() -> None:
    with pytest.raises(RequestError, match="'price' must name an op of the plan, got '0.weight'"):
        price_of(made(), "0.weight", model(), INPUT)

"""Rules that users give for their own ops: split, priced, checked, and refused by name where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright
from meshwright import OpRule
from meshwright.plans.errors import RequestError

from ..test_cases import case_of

OP = "hardcases::combine"


def rows(xs: list[torch.Tensor], scale: torch.Tensor | None = None, alpha: float = 1.0) -> list[Any]:
    """Results are the sum of the tensors and its mean over the rows: rows are a dim to sum over, but not to average."""
    assert all(x.is_meta for x in xs) and scale is None
    return [(("S(1)", "S(0)"), ["S(1)"] * len(xs)), (("P(sum)", "P(sum)"), ["P(sum)"] * len(xs))]


def wrong(xs: list[torch.Tensor], scale: torch.Tensor | None = None, alpha: float = 1.0) -> list[Any]:
    return [(("S(0)", "R"), ["S(0)"] * len(xs))]


def call() -> tuple[Any, tuple, dict[str, Any]]:
    return case_of("120_custom_op_tensor_list_kwargs").build()


def test_an_op_with_a_rule_is_split_and_equal() -> None:
    rules = [OpRule(op=OP, rule=rows)]
    pin = ["::hardcases.combine.0 = S(1)"]
    plan = meshwright.plan(*call(), cluster="cpu:2", mesh="2", rules=rules, constraints=pin)
    node = next(n for n in plan.nodes if n.op == "hardcases.combine")
    assert node.outputs == (("S(1)",), ("S(0)",)) and [e.layout for e in node.inputs] == [("S(1)",)] * 2
    assert meshwright.check(*call(), plan=plan, rules=rules).equal
    for mesh in ("4", "2x2"):
        assert meshwright.check(*call(), mesh=mesh, random=2, rules=rules).equal


def test_check_finds_a_wrong_rule() -> None:
    pin = ["::hardcases.combine.0 = S(0)"]
    rules = [OpRule(op=OP, rule=wrong)]
    report = meshwright.check(*call(), mesh="2", rules=rules, constraints=pin)
    assert not report.equal and report.max_error > 1e-3


def test_what_an_op_computes_is_part_of_its_price() -> None:
    def seconds(**price: Any) -> float:
        plan = meshwright.plan(*call(), cluster="cpu:2", mesh="2", rules=[OpRule(op=OP, rule=rows, **price)])
        return next(n.time_s for n in plan.nodes if n.op == "hardcases.combine")

    sizes: list[int] = []

    def flop(xs: list[torch.Tensor], scale: torch.Tensor | None = None, alpha: float = 1.0) -> float:
        sizes.append(xs[0].numel())
        return 1e12

    assert seconds(flop=flop) > 1e3 * seconds()
    assert set(sizes) == {24, 12}  # whole, and a piece of it


def test_an_op_without_a_rule_runs_whole_and_the_plan_says_so() -> None:
    found = meshwright.plan(*call(), cluster="cpu:2", mesh="2")
    (combined,) = (node for node in found.nodes if "combine" in node.op)
    assert combined.rule == "whole" and {layout for layout in combined.outputs} == {("R",)}
    assert "hardcases.combine: on every device, for no rule says how to split them" in found.summary(200)


def test_a_rule_that_fails_is_named() -> None:
    with pytest.raises(RequestError, match=r"called as hardcases::combine is, got TypeError: .* from its rule"):
        meshwright.plan(*call(), cluster="cpu:2", mesh="2", rules=[OpRule(op=OP, rule=lambda: [])])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((("S(0)",), ["S(0)", "S(0)"]), "rows of 2 results and 2 tensor arguments"),
        ((("S(0)", "S(0)"), ["S(0)"]), "rows of 2 results and 2 tensor arguments"),
        ((("S(0)", "S(1)"), ["S(0)", "S(0)"]), r"got S\(1\) for one of shape \[4\]"),
        ((("S(0)", "Q"), ["S(0)", "S(0)"]), "'placement' must be R"),
        (((None, "R"), ["S(0)", "S(0)"]), "None for what is no tensor"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(row: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        meshwright.plan(*call(), cluster="cpu:2", mesh="2", rules=[OpRule(op=OP, rule=lambda *a, **k: [row])])

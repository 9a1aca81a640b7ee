"""Every sharding rule is tried: one op on simulated ranks as the rule says, against the op on whole tensors."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import fx

from meshwright.passes.graph import Captured, tensor_args, values_of
from meshwright.passes.keeping import is_keep
from meshwright.passes.naming import draws_random, op_name
from meshwright.planner.sharding.strategies import OWN_RULES, Strategies, Strategy, op_key, rule_name
from meshwright.plans.layouts import pieces
from meshwright.plans.meshes import Mesh

from ..oracle import captured_values, strategy_error
from .rule_cases import CASES, Case

# On four devices, a dim of five leaves one without elements: only such strategies are tried there.
MESHES = [Mesh.of((2,)), Mesh.of((3,)), Mesh.of((2, 2)), Mesh.of((4,))]
TRIED_ON_GRID = 4  # strategies per op, of some tens


@pytest.fixture(scope="module")
def tried() -> set[object]:
    """Ops, shapes and meshes that a case has tried, so that no other does."""
    return set()


@functools.cache
def run(case: Case) -> tuple[Captured, dict[fx.Node, Any]]:
    torch.manual_seed(0)
    return captured_values(case.model(), case.inputs(), {})


def ops(case: Case) -> list[fx.Node]:
    found = run(case)[0].ops()
    return [n for n in found if op_name(n) != "getitem" and not draws_random(n) and not is_keep(n)]


def tolerance(node: fx.Node) -> float:
    """Of float64, or of the float32 that an op takes or gives."""
    near = [value for n in (node, *node.all_input_nodes) for value in values_of(n)]
    return 1e-6 if any(v is not None and v.dtype == torch.float32 for v in near) else 1e-9


def chosen(node: fx.Node, strategies: list[Strategy], mesh: Mesh) -> list[Strategy]:
    if mesh.shape == (4,):
        return [strategy for strategy in strategies if leaves_some_empty(node, strategy, mesh)]
    if mesh.ndim == 1 or len(strategies) <= TRIED_ON_GRID:
        return strategies
    return random.Random(0).sample(strategies, TRIED_ON_GRID)


def leaves_some_empty(node: fx.Node, strategy: Strategy, mesh: Mesh) -> bool:
    pairs = [*zip(values_of(node), strategy.outs, strict=True)]
    pairs += [(values_of(n)[0], layout) for n, layout in zip(tensor_args(node), strategy.ins, strict=True)]
    return any(
        0 in pieces(size, dim, layout, mesh.shape)
        for value, layout in pairs
        if value is not None and layout is not None and value.numel()
        for dim, size in enumerate(value.shape)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rules_compute_what_the_op_computes(case: Case, tried: set[object]) -> None:
    captured, values = run(case)
    wrong = []
    for mesh in MESHES:
        strategies = Strategies(mesh)
        for node in ops(case):
            key = (op_key(node), mesh.shape)
            if key in tried:
                continue
            tried.add(key)
            for strategy in chosen(node, strategies.of(node), mesh):
                error = strategy_error(node, strategy, mesh, values)
                if not error <= tolerance(node):
                    wrong.append((captured.names[node], str(mesh), strategy, error))
    assert not wrong


def test_every_own_rule_is_tried_by_some_case() -> None:
    assert set(OWN_RULES) - {rule_name(node) for case in CASES for node in ops(case)} == set()


def test_the_oracle_catches_a_wrong_rule() -> None:
    """A softmax along a split dim without its reductions; a mean of means of uneven pieces; a copy that differs."""
    case = next(case for case in CASES if case.name == "softmax")
    softmax = next(node for node in ops(case) if op_name(node) == "_softmax")
    mesh = Mesh.of((2,))
    values = run(case)[1]
    for outs, ins in [("S(1)", "S(1)"), ("R", "S(1)"), ("R", "P(sum)"), ("P(sum)", "R"), ("P(max)", "P(max)")]:
        assert strategy_error(softmax, Strategy(((outs,),), ((ins,),)), mesh, values) > 1e-3, (outs, ins)

"""Recipes on models: what they ask for is what comes out, it computes what the model computes, and no recipe beats the
free optimum."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from meshwright.planner.api import plan
from meshwright.planner.checking.verify import check
from meshwright.planner.sharding.capturing import Traces, captured_by_blocks
from meshwright.planner.sharding.constraints import Constraint, Constraints
from meshwright.planner.sharding.recipes import recipe_constraints
from meshwright.plans import Layout, Mesh, Plan, Recipe, RequestError
from meshwright.specs import load_spec

TINY = ("llama-tiny", "gpt2-tiny", "vit-tiny", "mixtral-tiny")
ONE = ("ddp", "fsdp", "zero1", "zero2", "tp", "tp-sp", "cp")
TWO = ("hsdp", "fsdp+tp", "ddp+tp-sp", "cp+tp", "fsdp+cp", "ddp+zero2")


@functools.lru_cache(maxsize=4)
def model_of(spec: str) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(0)
    model, args, kwargs = load_spec(spec, layers=1, batch=4).build()
    return model, args, kwargs or {}


@functools.lru_cache(maxsize=64)
def plan_of(spec: str, mesh: str, recipe: str | None) -> Plan:
    model, args, kwargs = model_of(spec)
    devices = Mesh.parse(mesh).size
    return plan(model, args, kwargs, cluster=f"h100-sxm:{devices}", mesh=mesh, recipe=recipe, recompute="pointwise")


def asked(spec: str, mesh: str, recipe: str) -> dict[str, Constraint]:
    """What a recipe asks of a model."""
    captured, _ = captured_by_blocks(Traces(*model_of(spec), None), Constraints(), "pointwise", whole=False)
    return recipe_constraints(Recipe.parse(recipe, Mesh.parse(mesh)), captured)


def layouts(found: Plan) -> dict[str, Layout]:
    """Where everything lies in a plan, by name."""
    held = {t.name: t.layout for t in (*found.parameters, *found.inputs)}
    return held | {n.name: n.outputs[0] for n in found.nodes if n.outputs and n.outputs[0] is not None}


def cases() -> list:
    """Every recipe that applies to a tiny model, on 2, 4 and 2x2 devices; a few of them are quick."""
    quick = {
        ("llama-tiny", "2", "tp-sp"),
        ("gpt2-tiny", "2", "cp"),
        ("vit-tiny", "2", "fsdp"),
        ("llama-tiny", "2", "zero1"),
    }
    found = [(spec, mesh, recipe) for spec in TINY for mesh in ("2", "4") for recipe in ONE]
    found += [(spec, "2x2", recipe) for spec in TINY for recipe in TWO]
    found += [("mixtral-tiny", "2", "ep"), ("mixtral-tiny", "4", "ep"), ("mixtral-tiny", "2x2", "fsdp+ep")]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in found]


@pytest.mark.parametrize(("spec", "mesh", "recipe"), cases())
def test_a_recipe_is_met_is_right_and_beats_nothing(spec: str, mesh: str, recipe: str) -> None:
    found = plan_of(spec, mesh, recipe)
    have = layouts(found)
    wanted = asked(spec, mesh, recipe)
    assert len(wanted) > 5
    for name, constraint in wanted.items():
        assert constraint.allows(have[name]), f"{constraint}, got {have[name]}"
    free = plan_of(spec, mesh, None)
    assert free.solver.bound_s <= found.predicted.step_time_s * (1 + 1e-9)
    assert free.predicted.step_time_s <= found.predicted.step_time_s * (1 + 1e-3)
    assert found.recipe().ways == Recipe.parse(recipe, found.mesh).ways, str(found.recipe())
    model, args, kwargs = model_of(spec)
    report = check(model, args, kwargs, mesh=mesh, recipe=recipe, recompute="pointwise", steps=2)
    assert report.equal and report.compared > 10, report.differences


@pytest.mark.parametrize(
    ("spec", "recipe", "weights"),
    [
        (
            "llama-tiny",
            "tp",
            {
                "tok_embeddings.weight": "S(0)",
                "layers.0.attention.wq.weight": "S(0)",
                "layers.0.attention.wo.weight": "S(1)",
                "layers.0.feed_forward.w1.weight": "S(0)",
                "layers.0.feed_forward.w2.weight": "S(1)",
                "layers.0.attention_norm.weight": "R",
                "output.weight": "S(0)",
            },
        ),
        (
            "gpt2-tiny",
            "tp",
            {
                "wte.weight": "S(0)",
                "wpe.weight": "R",
                "layers.0.attn.c_attn.bias": "S(0)",
                "layers.0.attn.c_proj.weight": "S(1)",
                "layers.0.attn.c_proj.bias": "R",
            },
        ),
        ("mixtral-tiny", "tp", {"layers.0.feed_forward.w1": "S(2)", "layers.0.feed_forward.w2": "S(1)"}),
        ("mixtral-tiny", "ep", {"layers.0.feed_forward.w1": "S(0)", "layers.0.feed_forward.w2": "S(0)"}),
    ],
)
def test_roles_are_found(spec: str, recipe: str, weights: dict[str, str]) -> None:
    found = asked(spec, "2", recipe)
    assert {name: found[name].layout for name in weights} == {name: (p,) for name, p in weights.items()}
    assert "layers.0.feed_forward.gate.weight" not in found


def test_experts_may_be_fewer_than_parts_of_the_batch() -> None:
    model, args, kwargs = load_spec("mixtral-tiny", layers=1, batch=16).build()
    captured, _ = captured_by_blocks(Traces(model, args, kwargs or {}, None), Constraints(), "pointwise", whole=False)
    found = recipe_constraints(Recipe.parse("fsdp+ep", Mesh.parse("8x2")), captured)
    assert found["layers.0.feed_forward.w1"].layout == ("S(*)", "S(0)")


def test_roles_do_not_go_by_names() -> None:
    """Functions on a list of nameless tensors: a pair, a head that is no pair, and a fused one that cannot be split."""

    class Nameless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [(16, 8), (8, 16), (8, 24), (8, 8)]
            self.p = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x @ self.p[0].t()).relu() @ self.p[1].t()
            a, b, c = (x @ self.p[2]).split(8, -1)
            return ((a * b + c) @ self.p[3]).softmax(-1).square().mean()

    model, args = Nameless(), (torch.randn(4, 6, 8),)
    captured, _ = captured_by_blocks(Traces(model, args, {}, None), Constraints(), "none", whole=False)
    found = recipe_constraints(Recipe.parse("tp", Mesh.parse("2")), captured)
    assert found["p.0"].layout == ("S(0)",) and found["p.1"].layout == ("S(1)",)
    assert "p.2" not in found


def test_models_that_a_recipe_does_not_fit() -> None:
    model, args = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), (torch.randn(4, 8),)
    call = {"cluster": "h100-sxm:2", "mesh": "2"}
    for recipe, says in (("tp", "needs pairs of weight products"), ("ep", "one per expert"), ("cp", "over a sequence")):
        with pytest.raises(RequestError, match="'recipe' must fit the model") as refused:
            plan(model, args, recipe=recipe, **call)
        assert says in str(refused.value)
    with pytest.raises(RequestError, match="splits the batch 2-fold, args.0 has 1"):
        plan(model, (torch.randn(1, 8),), recipe="ddp", **call)
    with pytest.raises(RequestError, match="'recipe' must fit the model and the constraints, got ddp:dp"):
        plan(model, args, recipe="ddp", constraints=["0.weight = S(0)"], **call)


def test_axes_left_out_are_open_and_dims_may_be() -> None:
    model, args, kwargs = model_of("gpt2-tiny")
    call = {"cluster": "h100-sxm:4", "mesh": "2x2", "recompute": "pointwise"}
    found = plan(model, args, kwargs, recipe="tp:tp", constraints=["wpe.weight = S(*),*"], **call)
    have = layouts(found)
    assert found.options.recipe == "tp:tp" and have["wte.weight"][1] == "S(0)" and have["wpe.weight"][0][0] == "S"

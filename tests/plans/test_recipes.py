"""Recipes: their text form for a mesh, and the recipe that a plan is like, by its layouts alone."""

from __future__ import annotations

import pytest

from meshwright.plans import RECIPES, Edge, Mesh, Node, Plan, Recipe, RequestError, Tensor
from meshwright.plans.recipes import recipe_name


@pytest.mark.parametrize(
    ("text", "mesh", "ways"),
    [
        ("fsdp", "8", ("fsdp",)),
        ("fsdp", "2x2x2", ("fsdp", "fsdp", "fsdp")),
        ("zero3+tp", "2x4", ("fsdp", "tp")),
        ("hsdp", "2x4", ("ddp", "fsdp")),
        ("hsdp:tp,dp", "2x4", ("fsdp", "ddp")),
        ("hsdp+tp-sp", "2x2x2", ("ddp", "fsdp", "tp-sp")),
        ("tp:1 + fsdp:dp", "2x4", ("fsdp", "tp")),
        ("tp:tp", "2x4", (None, "tp")),
        ("ddp:0,1+cp", "2x2x2", ("ddp", "ddp", "cp")),
        ("zero-2", "2x4", ("zero2", "zero2")),
        ("fsdp-keep+zero-1", "2x4", ("zero2", "zero1")),
    ],
)
def test_a_recipe_gives_each_axis_a_way(text: str, mesh: str, ways: tuple[str | None, ...]) -> None:
    recipe = Recipe.parse(text, Mesh.parse(mesh))
    assert recipe.ways == ways
    assert Recipe.parse(str(recipe), recipe.mesh) == recipe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fsdp+tp+cp", "one way for each of the axes dp, tp"),
        ("fsdp+", "must look like"),
        ("zero9", "must be of the ways ddp, fsdp"),
        ("ring", "take cp"),
        ("fsdp:x", "must name axes of the mesh, dp, tp or 0 to 1, got 'x'"),
        ("fsdp:2", "got '2'"),
        ("fsdp:0+tp:dp", "must give each axis one way"),
        ("hsdp:0", "must give hsdp 2 axes"),
    ],
)
def test_a_recipe_that_is_none_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(RequestError, match="'recipe'") as refused:
        Recipe.parse(text, Mesh.parse("2x4"))
    assert says in str(refused.value)


def test_names_that_people_use() -> None:
    assert recipe_name(("ddp", "fsdp")) == "hsdp" and recipe_name(("fsdp", "fsdp", "tp")) == "fsdp+tp"
    assert recipe_name(("ddp", "fsdp", "tp-sp")) == "hsdp+tp-sp"
    assert all(Recipe.parse(name, Mesh.parse("2x2")).ways for name in RECIPES)


def plan_like(
    sample: Plan, weight: tuple[str, str], read: tuple[str, str], x: tuple[str, str], out: tuple[str, str]
) -> Plan:
    """`sample` with one product of a weight, in these layouts."""
    edges = (
        Edge(source="args.0", output=0, layout=x, steps=("all_gather(tp, 1)",) if x[1] == "R" else (), time_s=0.0),
        Edge(source="w", output=0, layout=read, steps=(), time_s=0.0),
    )
    node = Node(name="m::einsum.0", op="einsum", outputs=(out,), inputs=edges, rule="", time_s=1.0, count=1)
    values = {name: getattr(sample, name) for name in sample.__struct_fields__}
    weights = (
        Tensor(name="w", shape=(64, 64), dtype="float32", layout=weight),
        Tensor(name="norm", shape=(64,), dtype="float32", layout=("R", "R")),
    )
    return Plan(**{**values, "parameters": weights, "nodes": (node,)})


@pytest.mark.parametrize(
    ("weight", "read", "x", "out", "name"),
    [
        (("R", "R"), ("R", "R"), ("S(0)", "S(0)"), ("S(0)", "S(0)"), "ddp"),
        (("R", "S(0)"), ("R", "R"), ("S(0)", "S(0)"), ("S(0)", "S(0)"), "hsdp"),
        (("S(0)", "S(1)"), ("R", "R"), ("S(0)", "S(0)"), ("S(0)", "S(0)"), "fsdp"),
        (("S(0)", "S(0)"), ("R", "S(0)"), ("S(0)", "R"), ("S(0)", "S(2)"), "fsdp+tp-sp"),
        (("R", "S(1)"), ("R", "S(1)"), ("S(0)", "S(2)"), ("S(0)", "P(sum)"), "ddp+tp"),
        (("R", "S(0)"), ("R", "S(0)"), ("S(1)", "S(0)"), ("S(1)", "S(0)"), "cp+ep"),
        (("R", "R"), ("R", "R"), ("R", "R"), ("R", "R"), ""),
    ],
)
def test_the_recipe_that_a_plan_is_like(
    sample_plan: Plan,
    weight: tuple[str, str],
    read: tuple[str, str],
    x: tuple[str, str],
    out: tuple[str, str],
    name: str,
) -> None:
    found = plan_like(sample_plan, weight, read, x, out).recipe()
    assert found.name == name
    # The norm, whole everywhere, is what an fsdp axis does not ask for.
    assert [e.name for e in found.exceptions] == ["norm"] * (found.ways.count("fsdp"))
    if name == "hsdp":
        assert str(found) == "hsdp: ddp over dp=4, fsdp over tp=8; except: norm is stored whole over tp"
    if not name:
        assert str(found) == "no named way over dp=4, no named way over tp=8"

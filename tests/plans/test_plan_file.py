"""The plan file: it comes back as it went, and nothing that is not a sound plan gets in."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.plans import Mesh, Plan, PlanError, RequestError, plan_schema

HOSTILE = (
    "",
    "\x1b[2J\x1b[31m",
    "a\x00b",
    "\u202egnp.exe",
    "[red]x[/red]",
    "__import__('os').system('false')",
    "../../etc/passwd",
    "x" * 100_000,
    "*" * 50,
    "S(99999999999999999999)",
    "S(-1)",
    "\ud800",
    "NaN",
    "{{7*7}}",
    "P(sum)\n",
)
NUMBERS = (-1, 0, 1, 2**31, 2**63, 2**64, 10**400, -0.0, 1e308, 1e-320, -1e9, 0.5)
Tree = dict[str, Any]


def refused(tree: Tree) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.from_bytes(json.dumps(tree).encode())
    return str(caught.value)


def test_a_plan_comes_back_as_it_went(sample_plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sample_plan.save(path)
    again = Plan.load(path)
    assert again == sample_plan
    assert again.to_bytes() == path.read_bytes() == sample_plan.to_bytes()
    assert again.digest() == sample_plan.digest()
    assert again.diff(sample_plan).same
    assert os.listdir(tmp_path) == ["plan.json"]


def test_the_order_of_keys_does_not_matter(sample_plan: Plan) -> None:
    tree = json.loads(sample_plan.to_bytes())
    assert Plan.from_bytes(json.dumps(tree, sort_keys=True).encode()) == sample_plan


def test_another_version_is_called_that(sample_plan: Plan) -> None:
    for version in (0, 3, 1.0, True, "1", None):
        tree = json.loads(sample_plan.to_bytes()) | {"version": version, "unheard": 1}
        assert "version" in refused(tree) and "plan" in refused(tree)
    assert "'version'" in refused(json.loads(sample_plan.to_bytes()) | {"version": 2})


def _blocks(tree: Tree, *more: tuple[str, int]) -> None:
    tree["model"]["blocks"] += [{"pattern": pattern, "count": count} for pattern, count in more]


def test_kinds_of_blocks_may_share_a_list(sample_plan: Plan) -> None:
    tree = json.loads(sample_plan.to_bytes())
    _blocks(tree, ("layers.0-54/6", 10), ("layers.5-59/6", 10), ("layers.60-61", 2))
    found = Plan.from_bytes(json.dumps(tree).encode())
    assert [stamp.pattern for stamp in found.model.stamps()] == [block.pattern for block in found.model.blocks]
    assert found.copies("layers.5-59/6.wq.weight") == 10


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda t: t["model"].pop("name"), "model.name"),
        (lambda t: t["cluster"].pop("memory_bytes"), "cluster.memory_bytes"),
        (lambda t: t["nodes"][0]["inputs"][0].pop("output"), "nodes[0].inputs[0].output"),
        (lambda t: t.pop("format"), "format"),
        (lambda t: t.update(unheard=1), "unheard"),
        (lambda t: t["mesh"].update(unheard=1), "mesh.unheard"),
        (lambda t: t["mesh"].update(shape=[0, 8]), "mesh"),
        (lambda t: t["mesh"].update(shape=[8, 8]), "mesh.shape"),
        (lambda t: t["mesh"].update(axis_names=["dp", "t p"]), "mesh.axis_names[1]"),
        (lambda t: t["model"].update(digest="0" * 63), "model.digest"),
        (lambda t: t["model"]["blocks"][0].update(pattern="model.layers"), "model.blocks[0].pattern"),
        (lambda t: t["model"].update(blocks=[]), "parameters[1].name"),
        (lambda t: _blocks(t, ("layers.3-60", 57)), "model.blocks[1].count"),
        (lambda t: _blocks(t, ("layers.60-3", 58)), "model.blocks[1].pattern"),
        (lambda t: _blocks(t, ("layers.5-59/7", 8)), "model.blocks[1].pattern"),
        (lambda t: _blocks(t, ("layers.*.3-60", 58)), "model.blocks[1].pattern"),
        (lambda t: _blocks(t, ("layers.0-4", 5), ("layers.4-6", 3)), "model.blocks[2].pattern"),
        (lambda t: _blocks(t, ("layers.0-54/6", 10), ("layers.4-30/2", 14)), "model.blocks[2].pattern"),
        (lambda t: _blocks(t, ("model.layers.6-7", 2), ("model.layers.5-8/3", 2)), "model.blocks[2].pattern"),
        (lambda t: t["model"].update(parameters=True), "model.parameters"),
        (lambda t: t["parameters"][0].update(layout=["R"]), "parameters[0].layout"),
        (lambda t: t["parameters"][0].update(layout=["R", "S(2)"]), "parameters[0].layout"),
        (lambda t: t["parameters"][0].update(layout=["R", "P(sum)"]), "parameters[0].layout"),
        (lambda t: t["parameters"][0].update(layout=["R", "X"]), "parameters[0].layout[1]"),
        (lambda t: t["parameters"][0].update(shape=[-1, 2]), "parameters[0].shape[0]"),
        (lambda t: t["parameters"].append(t["parameters"][0]), "parameters[2].name"),
        (lambda t: t["nodes"].append(t["nodes"][0]), "nodes[2].name"),
        (lambda t: t["nodes"][0].update(outputs=[["R", "R", "R"]]), "nodes[0].outputs[0]"),
        (lambda t: t["nodes"][0].update(time_s=-1.0), "nodes[0].time_s"),
        (lambda t: t["nodes"][0].update(count=0), "nodes[0].count"),
        (lambda t: t["nodes"][0]["inputs"][0].update(source="nobody"), "nodes[0].inputs[0].source"),
        (lambda t: t["nodes"][0]["inputs"][0].update(output=1), "nodes[0].inputs[0].output"),
        (lambda t: t["nodes"][0]["inputs"][0].update(steps=["gather(dp, 0)"]), "nodes[0].inputs[0].steps[0]"),
        (lambda t: t["nodes"][0]["inputs"][0].update(steps=["all_gather(pp, 0)"]), "nodes[0].inputs[0].steps[0]"),
        (lambda t: t["solver"].update(gap=-0.1), "solver.gap"),
        (lambda t: t["solver"].update(bound_s=2.0), "solver.bound_s"),
        (lambda t: t["predicted"]["memory"].update(peak_bytes=1), "predicted.memory.peak_bytes"),
        (lambda t: t.update(calibration="\x1b[2J"), "calibration"),
    ],
)
def test_a_broken_rule_is_named(sample_plan: Plan, change: Callable[[Tree], object], key: str) -> None:
    tree = json.loads(sample_plan.to_bytes())
    change(tree)
    message = refused(tree)
    assert message.startswith(f"plan key '{key}' must ")
    assert ", got " in message and "meshwright plan" in message
    assert message.isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 1_000_000,
        b'{"format":' * 100_000,
        b'{"format":"meshwright-plan","version":1,"x":' + b"[" * 500_000,
        b'{"format":"meshwright-plan","version":1e999}',
        b'{"format":"meshwright-plan","version":' + b"1" * 100_000 + b"}",
        b" " * ((64 << 20) + 1),
    ],
    ids=["empty", "null", "list", "object", "not-utf8", "bomb", "bomb2", "bomb3", "infinite", "digits", "too-long"],
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    start = time.monotonic()
    with pytest.raises(PlanError, match="^plan "):
        Plan.from_bytes(data)
    assert time.monotonic() - start < 10


def test_a_key_given_twice_is_refused(sample_plan: Plan) -> None:
    data = sample_plan.to_bytes().replace(b'"gap": 0.0,', b'"gap": 0.0, "gap": 0.0,')
    with pytest.raises(PlanError, match="'gap' must be given once"):
        Plan.from_bytes(data)
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
        with pytest.raises(PlanError, match="^plan "):
            Plan.from_bytes(sample_plan.to_bytes().replace(b'"gap": 0.0', b'"gap": ' + text))


def paths_in(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [path for key in keys for path in ((*at, key), *paths_in(tree[key], (*at, key)))]


def mutate_tree(tree: Tree, draw: random.Random) -> bytes:
    *parents, last = draw.choice(paths_in(tree))
    place: Any = tree
    for key in parents:
        place = place[key]
    kind = draw.choice(("delete", "rename", "double", "text", "number", "type", "nest", "swap"))
    if kind == "delete":
        del place[last]
    elif kind == "rename" and isinstance(place, dict):
        place[draw.choice(HOSTILE)] = place.pop(last)
    elif kind == "double" and isinstance(place, list):
        place.append(place[last])
    elif kind == "text":
        place[last] = draw.choice(HOSTILE)
    elif kind == "number":
        place[last] = draw.choice(NUMBERS)
    elif kind == "nest":
        text = json.dumps(tree | {"calibration": "@@"})
        depth = draw.choice((10, 900, 50_000))
        return text.replace('"@@"', "[" * depth + "]" * depth).encode()
    elif kind == "swap":
        place[last] = place[draw.choice(list(place.keys() if isinstance(place, dict) else range(len(place))))]
    else:
        place[last] = draw.choice((None, True, [], {}, [[]], {"": None}, 1, 1.5, "x", [place[last]]))
    return json.dumps(tree).encode()


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    kind = draw.choice(("flip", "cut", "drop", "double"))
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.randrange(1, 200))
    if kind == "cut":
        return data[:start]
    if kind == "drop":
        return data[:start] + data[end:]
    if kind == "double":
        return data[:end] + data[start:]
    out = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    return bytes(out)


@pytest.mark.parametrize("seed", [20260, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20261, 20271))])
def test_a_thousand_mutated_files_are_refused_or_sound(sample_plan: Plan, seed: int) -> None:
    """Ten thousand of them with the slow ones."""
    data = sample_plan.to_bytes()
    draw = random.Random(seed)
    refusals = 0
    start = time.monotonic()
    for index in range(1000):
        mutant = mutate_tree(json.loads(data), draw) if index % 2 else mutate_bytes(data, draw)
        try:
            plan = Plan.from_bytes(mutant)
        except PlanError as error:
            refusals += 1
            assert str(error).startswith("plan ") and str(error).isprintable() and len(str(error)) < 2000
        else:
            assert Plan.from_bytes(plan.to_bytes()) == plan
            assert plan.summary() and str(plan.diff(sample_plan))
    assert 700 < refusals < 1000
    assert time.monotonic() - start < 60


def test_what_cannot_be_read_is_refused(sample_plan: Plan, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "missing.json", tmp_path / "pipe", "/dev/zero", "a\0b", "\ud800", ""):
        with pytest.raises(PlanError, match="plan 'path' must name a readable file"):
            Plan.load(path)
    for path in (tmp_path, tmp_path / "missing" / "plan.json", tmp_path / "pipe", "a\0b", "\ud800", ""):
        with pytest.raises(RequestError, match="plan 'path' must be writable"):
            sample_plan.save(path)
    assert os.listdir(tmp_path) == ["pipe"]


def test_an_unsound_plan_leaves_the_old_file_alone(sample_plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sample_plan.save(path)
    solver = msgspec.structs.replace(sample_plan.solver, gap=float("nan"))
    changes: list[dict[str, Any]] = [{"solver": solver}, {"calibration": 3}, {"model": None}, {"calibration": "\n"}]
    for change in changes:
        with pytest.raises(PlanError, match="the plan in memory"):
            msgspec.structs.replace(sample_plan, **change).save(path)
    assert Plan.load(path) == sample_plan


def test_the_schema_asks_for_every_key() -> None:
    schema = plan_schema()
    assert json.loads(json.dumps(schema)) == schema
    for name, part in schema["$defs"].items():
        optional = {"stage_meshes"} if name == "Plan" else set()  # version 1 has none
        assert set(part["required"]) == set(part["properties"]) - optional, name
        assert part["additionalProperties"] is False


def test_the_summary_is_in_words_and_fits(sample_plan: Plan) -> None:
    text = sample_plan.summary()
    assert max(len(line) for line in text.splitlines()) <= 100
    for word in ("tiny", "h100-sxm:4x8", "dp=4, tp=8", "900 ms", "80.0 GiB", "split on dim 1", "all_gather(dp, 1)"):
        assert word in text
    assert "\x1b" not in text


def test_the_summary_shows_markup_as_it_is(sample_plan: Plan) -> None:
    model = msgspec.structs.replace(sample_plan.model, name="[red]x[/red] :smile:")
    assert "[red]x[/red] :smile:" in msgspec.structs.replace(sample_plan, model=model).summary()


def test_a_diff_speaks_the_models_words(sample_plan: Plan) -> None:
    embed = msgspec.structs.replace(sample_plan.parameters[0], layout=("S(0)", "R"))
    other = msgspec.structs.replace(
        sample_plan,
        mesh=Mesh((4, 4), ("dp", "tp")),
        parameters=(embed, *sample_plan.parameters[1:]),
        nodes=sample_plan.nodes[:1],
    )
    diff = sample_plan.diff(other)
    text = str(diff)
    assert not diff.same
    assert "mesh 4x8: axes: 4x8 (dp, tp) -> 4x4 (dp, tp)" in text
    layout = "whole on dp, split on dim 0 over tp -> split on dim 0 over dp, whole on tp"
    assert f"parameter embed.weight: layout: {layout}" in text
    assert "node model.layers.*.wq::mm.0: only in the first plan" in text

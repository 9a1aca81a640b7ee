"""What a plan alone says of a name, and how differences are grouped."""

from __future__ import annotations

import msgspec
import pytest

from meshwright.plans import Plan, RequestError, facts_of


def test_a_numbered_name_means_the_entry_that_stands_for_it(sample_plan: Plan) -> None:
    (fact,) = facts_of(sample_plan, ["model.layers.3.wq.weight"])
    assert (fact.kind, fact.name, fact.copies) == ("parameter", "model.layers.*.wq.weight", 6)
    assert fact.layout == "split on dim 1 over dp, split on dim 0 over tp"
    assert fact.device_bytes == 6 * (64 // 4) * (64 // 8) * 4
    (move,) = fact.moves
    assert move.reader == "model.layers.*.wq::mm.0" and move.count == 6 and move.seconds == pytest.approx(6 * 3e-4)
    text = "\n".join(fact.lines())
    assert "(6, model.layers.3.wq.weight among them)" in text and "all_gather(dp, 1), 6 times, 1.8 ms" in text


@pytest.mark.parametrize("asked", ["*wq*", "model.layers.2.w*", "model.layers.*.wq.weight"])
def test_names_match_with_stars(sample_plan: Plan, asked: str) -> None:
    assert "model.layers.*.wq.weight" in {fact.name for fact in facts_of(sample_plan, [asked])}


@pytest.mark.parametrize("asked", ["model.layers.6.wq.weight", "model.layers.x.wq.weight", "wq", ""])
def test_a_name_that_means_nothing_is_refused_with_near_ones(sample_plan: Plan, asked: str) -> None:
    with pytest.raises(RequestError, match="'name' must be a parameter"):
        facts_of(sample_plan, [asked])


def test_every_kind_of_entry_is_known(sample_plan: Plan) -> None:
    kinds = {fact.name: fact.kind for fact in facts_of(sample_plan, ["*"])}
    assert kinds["args.0"] == "input" and kinds["freqs"] == "buffer" and kinds["output"] == "output"
    assert kinds["embed::embedding.0"] == "op"


def test_changes_say_what_moved_on_which_axis_and_what_it_costs(sample_plan: Plan) -> None:
    weight = msgspec.structs.replace(sample_plan.parameters[1], layout=("S(1)", "R"))
    second = msgspec.structs.replace(sample_plan, parameters=(sample_plan.parameters[0], weight))
    (change,) = sample_plan.diff(second).changes
    assert str(change) == "parameter model.layers.*.wq.weight (6): split on dim 0 -> whole on tp"
    assert change.bytes == 6 * (64 * 16 - 8 * 16) * 4
    assert sample_plan.diff(second).lines()[0].endswith("whole on tp (+21.0 KiB)")


def test_equal_changes_are_one_line_and_dear_ops_come_first(sample_plan: Plan) -> None:
    nodes = []
    for number in range(5):
        edge = msgspec.structs.replace(sample_plan.nodes[1].inputs[1], steps=(), layout=("R", "S(0)"), time_s=0.0)
        nodes.append(
            msgspec.structs.replace(sample_plan.nodes[1], name=f"side.{number}.w::mm.0", inputs=(edge,), count=1)
        )
    slower = [
        msgspec.structs.replace(
            n,
            inputs=(msgspec.structs.replace(n.inputs[0], steps=("all_gather(dp, 1)",), time_s=1e-3 * (i == 4) + 1e-5),),
        )
        for i, n in enumerate(nodes)
    ]
    first = msgspec.structs.replace(sample_plan, nodes=(*sample_plan.nodes, *nodes))
    second = msgspec.structs.replace(sample_plan, nodes=(*sample_plan.nodes, *slower))
    (line,) = first.diff(second).lines()
    assert line.startswith("node side.*.w::mm.0 (5): communication: none -> model.layers.*.wq.weight: all_gather")
    assert line.endswith("(+1.05 ms)")

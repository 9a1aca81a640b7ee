"""Plans with a pipeline read, priced anew, explained, compared and carried over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from torch import nn

from meshwright.cli import run
from meshwright.planner.adapt import adapt, reprice
from meshwright.planner.api import plan
from meshwright.planner.apply import apply
from meshwright.planner.checking.verify import check
from meshwright.planner.explaining.explain import explain
from meshwright.plans import Pipeline, Plan, ReplayError, RequestError
from meshwright.specs import load_spec


def call(layers: int = 5) -> tuple[tuple, Any]:
    spec = load_spec("llama-tiny", batch=8, layers=layers)
    return spec.build(), spec.loss


def planned(layers: int = 5) -> Plan:
    built, loss = call(layers)
    return plan(
        *built, cluster="cpu:4", mesh="2", loss=loss, pipeline=2, microbatches=4, schedule="1f1b", time_limit_s=5.0,
        recompute="pointwise",
    )  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Plan:
    return planned()


def with_pipeline(made: Plan, **changes: Any) -> Plan:
    assert made.pipeline is not None
    return msgspec.structs.replace(made, pipeline=msgspec.structs.replace(made.pipeline, **changes))


def test_a_pipeline_is_priced_anew_as_it_was(made: Plan) -> None:
    built, loss = call()
    now = reprice(made, *built, loss=loss)
    assert now.predicted.step_time_s == pytest.approx(made.predicted.step_time_s, rel=1e-9)
    assert now.predicted.memory == made.predicted.memory
    assert made.diff(now).same and now.pipeline == made.pipeline


def test_a_diff_tells_stages_orders_and_degrees(made: Plan) -> None:
    assert made.pipeline is not None
    first, second = made.pipeline.stages
    moved = msgspec.structs.replace(second, first="layers.1")
    rows = (made.pipeline.schedule[0], made.pipeline.schedule[1].replace("1B3", "1I3 1W3"))
    other = with_pipeline(made, stages=(first, moved), schedule=rows, reduce_gradients="microbatch")
    told = {(c.name, c.what): (c.before, c.after) for c in made.diff(other).changes}
    assert told["stages.1", "begins with"] == (second.first, "layers.1")
    assert told["order of rank 1", "action 7 of 9, 2 differ"] == ("1B3", "1I3")
    assert told["reduce_gradients", "once in a"] == ("step", "microbatch")
    alone = {c.name: (c.before, c.after) for c in made.diff(msgspec.structs.replace(made, pipeline=None)).changes}
    assert alone == {"ranks": ("2", "1"), "microbatches": ("4", "1")}


def test_a_pipeline_without_room_is_refused_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    size = "--cluster cpu:4 --pipeline 2 --mesh 2 --microbatches 4 --global-batch 8"
    line = f"plan llama-tiny {size} --memory-limit 100kB"
    assert run(line.split()) == 3
    assert "bytes per device" in capsys.readouterr().err


def test_a_wrong_pipeline_is_refused_before_a_model_is_looked_at(made: Plan) -> None:
    assert made.pipeline is not None
    wrong = with_pipeline(made, schedule=made.pipeline.schedule[::-1])
    nothing = nn.Module()
    with pytest.raises(RequestError, match="run a stage on its own rank"):
        apply(wrong, nothing)
    with pytest.raises(RequestError, match="run a stage on its own rank"):
        reprice(wrong, nothing)
    with pytest.raises(RequestError, match="multiple of the 2 ranks"):
        plan(nothing, call()[0][1], cluster="cpu:2", pipeline=2, microbatches=3, schedule="interleaved:2")


def test_a_pipeline_is_explained_without_a_model(made: Plan) -> None:
    text = str(explain(made, "pipeline.stages.*"))
    assert "stage pipeline.stages.1\n  begins with layers." in text and "on rank 1" in text
    with pytest.raises(RequestError, match="'name' must be"):
        explain(made, "pipeline.stages.2")


@pytest.mark.slow
def test_a_pipeline_is_explained_by_other_pipelines(made: Plan) -> None:
    built, loss = call()
    found = explain(made, "pipeline", *built, loss=loss, time_limit_s=4.0)
    told = {one.condition: one for one in found.alternatives}
    own = told["with 1f1b on 2 stages of even time"]
    assert own.predicted is not None and own.predicted.step_time_s == pytest.approx(made.predicted.step_time_s)
    assert own.changes is not None and own.changes.same and own.status == "priced"
    moved = explain(made, "pipeline.stages.1", *built, loss=loss).alternatives
    assert len(moved) == 2
    assert all(m.predicted is not None and m.changes is not None and not m.changes.same for m in moved)


@pytest.mark.slow
def test_the_next_best_layout_in_a_pipeline(made: Plan) -> None:
    built, loss = call()
    found = explain(made, "layers.2.attention.wq.weight", *built, loss=loss, time_limit_s=20.0).alternatives[0]
    assert found.status == "bounded" and found.predicted is not None and found.changes is not None
    assert found.bound_s <= found.predicted.step_time_s
    assert found.changes.changes and not any(change.kind == "pipeline" for change in found.changes.changes)
    limits = explain(made, (), *built, loss=loss, time_limit_s=20.0).limits
    assert [limit.binds for limit in limits] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [5, 7])
def test_a_pipeline_is_carried_over(made: Plan, layers: int) -> None:
    built, loss = call(layers)
    found = adapt(made, *built, loss=loss, time_limit_s=5.0)
    assert found.recut == (layers != 5) and not found.changed and not found.new
    if layers == 5:
        assert made.diff(found.plan).same
    else:
        assert "stages and schedule of the pipeline made anew" in str(found)
        assert found.plan.pipeline is not None and found.plan.pipeline.ranks == 2
        with pytest.raises(ReplayError, match="layers"):
            reprice(made, *built, loss=loss)
    report = check(*built, plan=found.plan, loss=loss)
    assert report.equal, report.differences


@pytest.mark.slow
def test_stages_that_begin_within_units_are_priced(made: Plan) -> None:
    built, loss = call()
    assert made.pipeline is not None
    within = next(n.name for n in made.nodes if "feed_forward" in n.name and "::bwd" not in n.name)
    first = within.replace("*", "2").replace("1-3", "2")
    stages = (made.pipeline.stages[0], msgspec.structs.replace(made.pipeline.stages[1], first=first, cost=None))
    now = reprice(with_pipeline(made, stages=stages), *built, loss=loss)
    assert isinstance(now.pipeline, Pipeline) and all(stage.cost is not None for stage in now.pipeline.stages)
    whole = [sum(s.cost.forward_s for s in p.pipeline.stages) for p in (made, now)]  # type: ignore[union-attr]
    assert whole[1] == pytest.approx(whole[0])

"""Actions and schedules as values, and their pictures."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from meshwright.plans import (
    Action,
    RequestError,
    Schedule,
    TimedAction,
    parse_action,
    schedule_svg,
    schedule_text,
    schedule_trace,
)


def small() -> Schedule:
    rows = (("0F0", "0F1", "0I0", "0W0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    actions = tuple(tuple(parse_action(text) for text in row) for row in rows)
    return Schedule(microbatches=2, placement=(0, 1), actions=actions)


@pytest.mark.parametrize("text", ["2F0", "10SEND_B3", "0REDUCE_GRAD", "7RECV_F12"])
def test_actions_read_what_they_write(text: str) -> None:
    assert str(parse_action(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "0UNSHARD3", "-1F0", "2F0 ", "2f0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="'action' must be"):
        parse_action(text)


def test_csv_and_grid() -> None:
    schedule = small()
    schedule.check()
    text = schedule.to_csv()
    assert text.splitlines()[1] == "1F0,1B0,1F1,1B1"
    assert Schedule.from_csv(text, placement=(0, 1), microbatches=2) == schedule
    assert schedule.grid().splitlines()[0] == "rank 0: 0F0 0F1 0I0 0W0 0B1"


def test_communication_is_written_out() -> None:
    lowered = small().with_communication()
    assert [str(action) for action in lowered.actions[1]] == [
        *("1RECV_F0", "1F0", "1B0", "1SEND_B0"),
        *("1RECV_F1", "1F1", "1B1", "1SEND_B1"),
    ]


def timeline() -> tuple[tuple[TimedAction, ...], ...]:
    return (
        (TimedAction(Action(0, "F", 0), 0.0, 2.0), TimedAction(Action(0, "B", 0), 6.0, 10.0)),
        (TimedAction(Action(1, "F", 0), 2.0, 4.0), TimedAction(Action(1, "B", 0), 4.0, 6.0)),
    )


def test_text_picture() -> None:
    lines = schedule_text(timeline(), columns=10).splitlines()
    assert lines[0] == "rank  0 FF....BBBB"
    assert lines[1] == "rank  1 ..FFBB...."


def test_svg_picture() -> None:
    memory = (((0.0, 0.0), (0.0, 2.0), (10.0, 0.0)), ((0.0, 0.0), (2.0, 2.0), (6.0, 0.0)))
    root = ElementTree.fromstring(schedule_svg(timeline(), memory=memory, limits=(3.0, 3.0)))
    names = [element.tag.split("}")[1] for element in root.iter()]
    assert names.count("rect") == 4 and names.count("polygon") == 2 and names.count("line") == 2
    assert "0B0 6 to 10" in {title.text for title in root.iter("{http://www.w3.org/2000/svg}title")}


def test_trace_has_predicted_and_measured_side_by_side() -> None:
    trace = json.loads(schedule_trace(predicted=timeline(), measured=timeline(), unit_s=1e-3))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 8
    last = next(event for event in events if event["name"] == "0B0")
    assert (last["ts"], last["dur"], last["args"]) == (6000, 4000, {"stage": 0, "microbatch": 0})
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"rank 0 predicted", "rank 0 measured", "rank 1 predicted", "rank 1 measured"}

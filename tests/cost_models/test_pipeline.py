"""The pipeline simulator: data, communication, bubbles, memory, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost_models.pipeline import StageCosts, simulate
from meshwright.plans import Action, RequestError, Schedule, parse_action


def schedule(*rows: str, placement: tuple[int, ...], microbatches: int) -> Schedule:
    actions = tuple(tuple(parse_action(word) for word in row.split()) for row in rows)
    return Schedule(microbatches=microbatches, placement=placement, actions=actions)


def two(microbatches: int = 1) -> Schedule:
    forth = " ".join(f"0F{i}" for i in range(microbatches))
    back = " ".join(f"0I{i} 0W{i}" for i in range(microbatches))
    other = " ".join(f"1F{i} 1B{i}" for i in range(microbatches))
    return schedule(f"{forth} {back}", other, placement=(0, 1), microbatches=microbatches)


COSTS = StageCosts(forward=(2.0, 3.0), input_gradient=(5.0, 7.0), weight_gradient=(1.0, 11.0), delay=0.5).complete()


def test_data_waits_for_the_transfer() -> None:
    found = simulate(two(), COSTS)
    times = {str(t.action): (t.start, t.end) for row in found.timeline for t in row}
    assert times == {"0F0": (0, 2), "1F0": (2.5, 5.5), "1B0": (5.5, 23.5), "0I0": (24, 29), "0W0": (29, 30)}
    assert found.makespan == found.step_time == 30
    assert found.longest_stage_time == 30
    assert [str(timed.action) for _, timed in found.critical_path] == ["0F0", "1F0", "1B0", "0I0", "0W0"]
    assert found.peak_memory == (2, 2)
    assert found.memory[0] == ((0, 0), (0, 2), (29, 1), (30, 0))


def test_bubbles_add_up() -> None:
    found = simulate(two(3), COSTS)
    for bubble, row in zip(found.bubbles, found.timeline, strict=True):
        assert bubble.total == pytest.approx(found.makespan - sum(t.end - t.start for t in row))
    assert found.bubbles[1].warmup == 2.5


def test_a_bandwidth_adds_to_the_delay() -> None:
    costs = replace(COSTS, boundary_bytes=(8.0,), bandwidth=4.0)
    assert simulate(two(), costs).makespan == 34


def test_transfers_that_take_compute_time_hold_the_sender() -> None:
    costs = replace(COSTS, delay=4.0)
    hidden, open_ = simulate(two(3), costs), simulate(two(3), replace(costs, overlap=False))
    assert open_.makespan >= hidden.makespan
    sends = [t for row in open_.timeline for t in row if t.action.kind.startswith("SEND")]
    assert len(sends) == 6 and all(t.end - t.start == 4 for t in sends)


def test_blocking_receives_wait_where_they_stand() -> None:
    lowered = schedule(
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        placement=(0, 1),
        microbatches=2,
    )
    loose = simulate(lowered, COSTS)
    strict = simulate(lowered, replace(COSTS, blocking=True))
    start = {str(t.action): t.start for t in strict.timeline[0]}
    assert start["0F1"] == 24
    assert strict.makespan > loose.makespan


def test_receives_of_a_pair_are_in_the_order_of_its_sends() -> None:
    placement = (0, 1, 1, 0)
    rows = (
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    )
    plain = schedule(*rows, placement=placement, microbatches=2)
    lowered = plain.with_communication()
    costs = StageCosts.equal(4, 1.0, 1.0, 1.0, 0.25)
    assert simulate(lowered, costs).makespan == simulate(plain, costs).makespan
    simulate(lowered, replace(costs, blocking=True))
    wrong = [list(row) for row in lowered.actions]
    places = [index for index, action in enumerate(wrong[0]) if action.kind.startswith("RECV")]
    wrong[0][places[0]], wrong[0][places[1]] = wrong[0][places[1]], wrong[0][places[0]]
    with pytest.raises(RequestError, match="in the order of the sends"):
        simulate(replace(plain, actions=tuple(tuple(row) for row in wrong)), costs)


def test_standing_still_is_said_with_the_action() -> None:
    still = schedule("0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0", placement=(0, 1, 1, 0), microbatches=1)
    with pytest.raises(RequestError, match=r"2F0 on rank 1 waiting for 1F0(.|\n)*>2F0<"):
        simulate(still, StageCosts.equal(4, 1.0, 1.0, 1.0))


def test_microbatches_of_different_cost() -> None:
    found = simulate(two(2), replace(COSTS, microbatch_scale=(1.0, 3.0)))
    lengths = {str(t.action): t.end - t.start for row in found.timeline for t in row}
    assert lengths["0F0"] == 2 and lengths["0F1"] == 6 and lengths["1B1"] == 54
    with pytest.raises(RequestError, match="must have 1 entries"):
        simulate(two(1), replace(COSTS, microbatch_scale=(1.0, 3.0)))


def test_overhead_gathers_and_reductions() -> None:
    plain = two()
    assert simulate(plain, replace(COSTS, overhead=1.0)).makespan == 35
    rows = (
        (Action(0, "UNSHARD"), *plain.actions[0], Action(0, "REDUCE_GRAD")),
        (Action(1, "UNSHARD"), *plain.actions[1], Action(1, "REDUCE_GRAD")),
    )
    costs = replace(COSTS, gather=(4.0, 1.0), reduce=(3.0, 2.0), finish=(10.0, 0.0))
    found = simulate(replace(plain, actions=rows), costs)
    start = {str(t.action): t.start for row in found.timeline for t in row}
    # The gathers run beside the arithmetic: that of stage 1 is over long before its input is there.
    assert start["0F0"] == 4 and start["1F0"] == 6.5
    assert start["0REDUCE_GRAD"] == 34 and found.makespan == 37 and found.step_time == 47


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0", "1F0 1F0 1B0"), "in order"),
        (("0F0 0B0", "1F0 1I0"), "one F, one I and one W"),
        (("0B0 0F0", "1F0 1B0"), "before 0B0"),
        (("0F0 1B0", "1F0 0B0"), "own rank"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "stage 1 for micro-batch 1"),
    ],
)
def test_what_is_no_schedule_is_refused(rows: tuple[str, ...], message: str) -> None:
    count = 2 if "F1" in rows[0] else 1
    with pytest.raises(RequestError, match=message):
        simulate(schedule(*rows, placement=(0, 1), microbatches=count), COSTS)


def test_costs_are_checked() -> None:
    with pytest.raises(RequestError, match="'weight_gradient' must have 2 entries"):
        StageCosts(forward=(1.0, 1.0), input_gradient=(1.0, 1.0), weight_gradient=(1.0,)).complete()
    with pytest.raises(RequestError, match="finite numbers of at least 0"):
        StageCosts.equal(2, -1.0, 1.0, 1.0)
    with pytest.raises(RequestError, match="a cost for each stage"):
        simulate(two(), StageCosts.equal(3, 1.0, 1.0, 1.0))

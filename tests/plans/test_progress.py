"""Schedules that would hang or mix up tensors on real ranks are refused before they run, the failing action marked."""

from __future__ import annotations

import random

import pytest

from meshwright.planner.zoo import chunks_of, named_schedule
from meshwright.plans import Action, Pipeline, RequestError, Schedule, Stage, parse_action, progress


def schedule(placement: tuple[int, ...], microbatches: int, *rows: str) -> Schedule:
    actions = tuple(tuple(parse_action(text) for text in row.split()) for row in rows)
    return Schedule(microbatches=microbatches, placement=placement, actions=actions)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:2", "looped-bfs:3", "zb-h1", "zb-h2", "zb-v", "v-half"])
def test_published_schedules_come_to_their_end(name: str) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (4, 12)):
        order = progress(named_schedule(name, ranks, microbatches))
        computed = [action for _, action in order if action.is_compute]
        assert len({a for a in computed if a.kind == "F"}) == ranks * chunks_of(name) * microbatches


def test_what_is_received_has_been_sent_first() -> None:
    order = progress(named_schedule("zb-v", 3, 6))
    at = {action: index for index, (_, action) in enumerate(order)}
    for action, index in at.items():
        if action.kind in ("RECV_F", "RECV_B"):
            step = -1 if action.kind == "RECV_F" else 1
            sent = Action(action.stage + step, action.kind.replace("RECV", "SEND"), action.microbatch)
            assert at[sent] < index


def test_receives_out_of_the_order_of_the_sends() -> None:
    """What torch's defer_pp_recv makes of a V schedule: one tensor would be taken for another."""
    lowered = named_schedule("zb-v", 2, 2).with_communication()
    rows = [list(row) for row in lowered.actions]
    receives = [i for i, action in enumerate(rows[1]) if action.kind.startswith("RECV")]
    first, second = receives[0], receives[1]
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    mixed = Schedule(microbatches=2, placement=lowered.placement, actions=(lowered.actions[0], tuple(rows[1])))
    with pytest.raises(RequestError, match="in the order of the sends.*take one tensor for another") as caught:
        progress(mixed)
    assert f">{mixed.actions[1][first]}<" in str(caught.value) and "rank 0: 0F0" in str(caught.value)


def test_ranks_that_wait_for_each_other() -> None:
    lines = ("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(RequestError, match="come to its end, got 0RECV_B0 on rank 0 waiting for 1SEND_B0") as caught:
        progress(schedule((0, 1), 1, *lines))
    assert ">0RECV_B0<" in str(caught.value) and ">1RECV_F0<" in str(caught.value) and "2 of 2" in str(caught.value)


def test_what_is_sent_and_not_received() -> None:
    with pytest.raises(RequestError, match="come to its end, got 0B0 on rank 0 waiting for 0RECV_B0"):
        progress(schedule((0, 1), 1, "0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"))
    with pytest.raises(RequestError, match="receive all that is sent, got 1SEND_B0 from rank 1"):
        progress(
            schedule(
                (0, 1, 0),
                1,
                "0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0",
                "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1SEND_B0",
            )
        )


def test_orders_that_no_data_allows() -> None:
    """Found before anything runs, not by 'Malformed compute schedule' or by a wrong loss."""
    with pytest.raises(RequestError, match="micro-batches in order, got 1F1"):
        progress(schedule((0, 1), 2, "0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"))
    with pytest.raises(RequestError, match="0F0 before 0I0"):
        progress(schedule((0,), 1, "0I0 0F0 0W0"))
    with pytest.raises(RequestError, match="got 1F0 on rank 0 waiting for 0F0"):
        progress(schedule((0, 0), 1, "1F0 0F0 1B0 0B0"))
    with pytest.raises(RequestError, match="as one F and one B"):
        progress(schedule((0, 1), 2, "0F0 0B0", "1F0 1F1 1B0 1B1"))


def test_a_rank_without_a_stage() -> None:
    pipeline = Pipeline(ranks=2, microbatches=1, stages=(Stage(first="", rank=0),), schedule=("0F0 0B0", ""))
    with pytest.raises(RequestError, match="give each of 2 pipeline ranks a stage"):
        pipeline.check()


def test_stages_in_any_order_on_any_rank() -> None:
    """Any placement, with stages of a rank in any order, as long as each waits for its data."""
    rng = random.Random(0)
    for _ in range(50):
        stages, ranks, microbatches = rng.randint(2, 6), rng.randint(1, 3), rng.randint(1, 4)
        place = [*range(min(ranks, stages)), *(rng.randrange(ranks) for _ in range(max(0, stages - ranks)))]
        rng.shuffle(place)
        placement = tuple(place[:stages])
        rows: list[list[Action]] = [[] for _ in range(ranks)]
        for index in range(microbatches):
            for stage in range(stages):
                rows[placement[stage]].append(Action(stage, "F", index))
        for index in range(microbatches):
            for stage in reversed(range(stages)):
                rows[placement[stage]].append(Action(stage, "B", index))
        found = Schedule(microbatches=microbatches, placement=placement, actions=tuple(tuple(row) for row in rows))
        assert len([a for _, a in progress(found) if a.is_compute]) == 2 * stages * microbatches

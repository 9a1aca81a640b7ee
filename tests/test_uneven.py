"""Replicas of unlike sizes on real processes: after a loss each goes on with what it has left, on its share of a batch.

The numbers are those of one process (float64, 1e-12), every sample is used once, and state is its donors' bit by bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .elastic_checks import prompt, reference, several, sound
from .test_elastic import PIPELINED, kill

# Pairs that split each layer; after a loss one of them is a single process.
PAIRS = {
    "plain": True,
    "samples": 13,
    "epochs": 2,
    "constraints": ["*.weight = R,S(0)", "*.bias = R,S(0)", "args.0 = S(0),R"],
    "meshes": {"6": "3x2", "5": "1x2 + 1x2 + 1x1", "4": "2x2", "3": "1x2 + 1x1", "2": "1x1 + 1x1", "1": "1x1"},
}


def test_a_pair_and_a_single_process_share_each_batch(tmp_path: Path) -> None:
    # Batches of 6, 6 and 1: of the last one the single process has no sample.
    found = several(tmp_path, {"run": {**PAIRS, "faults": [kill(3, 1, "backward"), kill(1, 4, "optimizer")]}})["run"]
    sound(found, reference(13, 2, plain=True), samples=13, resumes=3)
    prompt(found)
    assert found.members() == [(0, 1, 2, 3), (0, 1, 2), (0, 2)]


@pytest.mark.slow
def test_unlike_replicas_lose_more_take_one_up_and_save(tmp_path: Path) -> None:
    # Equal replicas cannot share a batch of one: where they run, all batches are of six.
    twelve = {**PAIRS, "samples": 12}
    steps = (kill(5, 1, "backward"), kill(1, 2, "optimizer"), kill(0, 4, "gate"), kill(2, 5, "forward"))
    saved = {"checkpoint": str(tmp_path / "saved"), "every": 1}
    rules = {**PAIRS["meshes"], "4": "1x2 + 1x1 + 1x1"}
    runs: dict[str, dict[str, Any]] = {
        "in turn": {**PAIRS, "meshes": rules, "nproc": 6, "faults": list(steps)},
        "in the move": {**twelve, "faults": [kill(3, 1, "forward"), {"who": 0, "epoch": 2, "at": "move"}]},
        "back": {**twelve, "pause_s": 0.3, "limits": {"respawn": 1}, "faults": [kill(0, 1, "backward")]},
        "saved": {**twelve, **saved, "faults": [kill(0, 1, "backward"), kill(2, 2, "save")]},
        "again": {**twelve, **saved, "epochs": 3},
    }
    found = several(tmp_path, runs)
    sound(found["in turn"], reference(13, 2, plain=True), samples=13, resumes=1)
    alone = reference(12, 3, plain=True)
    for name in ("in the move", "back", "saved"):
        sound(found[name], alone[:4], samples=12, resumes=1)
    assert [len(members) for members in found["in turn"].members()] == [6, 5, 4, 3, 2]
    assert [len(members) for members in found["back"].members()] == [4, 3, 4]
    # What unlike replicas wrote is an ordinary checkpoint.
    assert found["again"].code == 0 and "epoch 1 runs from step 4" in found["again"].said
    losses = found["again"].losses()
    assert sorted(losses) == [4, 5]
    assert max(abs(value - alone[step]) for step, values in losses.items() for value in values) < 1e-12


@pytest.mark.slow
def test_pipelines_of_unlike_lengths_share_the_microbatches(tmp_path: Path) -> None:
    rules = {"4": "2", "3": "2*1 + 1*1", "2": "1*1 + 1*1"}
    given = {**PIPELINED, "spec": "gpt2-tiny", "meshes": rules, "constraints": ["*.weight = R"]}
    faults = [kill(1, 2, "midway"), kill(0, 5, "optimizer")]
    found = several(tmp_path, {"run": {**given, "faults": faults}}, watchdog_s=120.0)["run"]
    sound(found, reference(24, 3, spec="gpt2-tiny", size=8), samples=24, size=8, resumes=3)
    prompt(found)
    assert [len(members) for members in found.members()] == [4, 3, 2]

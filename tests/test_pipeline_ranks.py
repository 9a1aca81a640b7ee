"""Pipelines on real ranks: gloo processes that train as a user would, against one process. What they do is in
pipeline_jobs.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .test_runtime import TOLERANCE, numbers, on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quick job, on two ranks."""
    return on_ranks("piped", 2, tmp_path_factory.mktemp("two"))["piped"]


def test_a_pipeline_trains_as_one_process_does(found: dict[str, Any]) -> None:
    assert max(numbers(found)) < TOLERANCE and found["same class"]


def test_a_rank_holds_the_parameters_of_its_stages(found: dict[str, Any]) -> None:
    first, second = found["holders"]
    assert "embed.weight" in first and "embed.weight" not in second
    assert "blocks.1.weight" in second and "blocks.1.weight" not in first


def test_measured_times_are_those_of_the_schedule(found: dict[str, Any]) -> None:
    rows = found["rows"]
    assert rows[0][0] == "0F0" and rows[1][0] == "1F0" and len(rows) == 2
    assert {"0REDUCE_GRAD", "3REDUCE_GRAD"} < set(rows[0]) and {"1REDUCE_GRAD", "2REDUCE_GRAD"} < set(rows[1])


def test_what_a_pipeline_refuses(found: dict[str, Any]) -> None:
    assert found["called"].startswith("RequestError") and "model.step(batch)" in found["called"]
    assert found["batch of 3"].startswith("RequestError") and "got 4 for 3 (dim 0 of" in found["batch of 3"]


def test_a_failure_reaches_every_rank(found: dict[str, Any]) -> None:
    first, second = found["a rank fails"]
    assert found["at once"] and second.startswith("StepError: pipeline rank 1") and "ZeroDivisionError" in second
    assert re.search(r"failed in 1[BI]0", second)
    assert first.startswith("StepError: pipeline rank 0 (process 0) failed in ")
    assert all("apply the plan again" in text for text in found["after a failure"])


def test_no_rank_waits_for_ever(found: dict[str, Any]) -> None:
    text = found["a rank is gone"][0]
    assert text.startswith("StepError: pipeline rank 0 (process 0) failed in ") and "1000ms" in text


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_pipelines(size: int, tmp_path: Path) -> None:
    assert max(numbers(on_ranks("random_piped", size, tmp_path)["random_piped"])) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_stages_on_meshes(size: int, tmp_path: Path) -> None:
    assert max(numbers(on_ranks("grid", size, tmp_path)["grid"])) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4, 8])
def test_ranks_with_different_meshes(size: int, tmp_path: Path) -> None:
    assert max(numbers(on_ranks("mixed_piped", size, tmp_path)["mixed_piped"])) < TOLERANCE

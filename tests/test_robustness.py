"""Whatever is asked, and whenever it is interrupted: a clear error or a valid result, and no file half written."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.plans import Infeasible, MeshwrightError, Plan, RequestError

SLOW = pytest.mark.slow
INPUTS = (torch.ones(6, 8),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def constraints(draw: random.Random) -> list[str]:
    """Some that can be met, some that cannot, some that contradict each other, some that are no constraints."""
    names = ["up.weight", "up.bias", "*.weight", "*", "args.0", "down::einsum.0", "up::*", "nothing", "a b", ""]
    parts = ["R", "S(0)", "S(1)", "*", "P(sum)", "P(max)", "S(7)", "S(-1)", "Q", ""]
    weights = [8, 8, 8, 8, 3, 1, 1, 1, 1, 1]
    found = []
    for _ in range(draw.randint(0, 5)):
        name = draw.choices(names, [9, 9, 9, 5, 9, 9, 5, 1, 1, 1])[0]
        layout = ",".join(draw.choices(parts, weights, k=draw.choice([1, 1, 1, 1, 2])))
        found.append(f"{name} {draw.choice(['=', '!=', '=', '!=', '=='])} {layout}")
    return found


@pytest.mark.parametrize(
    "seeds", [range(8), *(pytest.param(range(s, s + 100), marks=SLOW) for s in range(8, 1000, 100))]
)
def test_random_constraints_are_met_or_refused(seeds: range) -> None:
    """A thousand sets of them with the slow ones."""
    for seed in seeds:
        draw = random.Random(seed)
        asked = constraints(draw)
        limit = draw.choice([None, None, 10**9, 2000, 1])
        try:
            found = mw.plan(Net(), INPUTS, cluster="h100-sxm:2", mesh="2", constraints=asked, memory_limit_bytes=limit)
        except (RequestError, Infeasible) as error:
            text = str(error)
            assert text.startswith("'") and " must " in text and ", got " in text, (asked, text)
            continue
        assert Plan.from_bytes(found.to_bytes()) == found
        assert limit is None or found.predicted.memory.peak_bytes <= limit
        layouts = {tensor.name: tensor.layout for tensor in (*found.parameters, *found.inputs)}
        for text in asked:
            constraint = mw.Constraint.parse(text, 1)
            if constraint.name in layouts:
                assert constraint.allows(layouts[constraint.name]), asked


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C, wherever the program is then."""

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=SLOW)])
def test_an_interrupted_plan_is_the_best_so_far_or_none(count: int, tmp_path: Path) -> None:
    model = Net()
    began = time.perf_counter()
    whole = mw.plan(model, INPUTS, cluster="h100-sxm:2", mesh="2")
    usual = time.perf_counter() - began
    draw, path = random.Random(count), tmp_path / "plan.json"
    outcomes = set()
    for _ in range(count):
        before = path.read_bytes() if path.exists() else None
        try:
            with interrupted_after(draw.uniform(1e-3, 1.2 * usual)):
                found = mw.plan(model, INPUTS, cluster="h100-sxm:2", mesh="2")
                found.save(path)
        except KeyboardInterrupt:
            outcomes.add("none")
            assert before is None or not path.exists() or Plan.load(path)
        else:
            outcomes.add(found.solver.status)
            assert Plan.load(path) == found
            assert found.predicted.step_time_s >= whole.predicted.step_time_s * (1 - whole.solver.gap - 1e-9)
        assert os.listdir(tmp_path) in ([], ["plan.json"])
    assert outcomes <= {"none", "optimal", "feasible", "interrupted"}
    assert mw.plan(model, INPUTS, cluster="h100-sxm:2", mesh="2").nodes == whole.nodes


# A file that was opened in the very moment of the interrupt is closed by the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=SLOW)])
def test_an_interrupted_save_leaves_the_old_file_or_the_new(count: int, tmp_path: Path) -> None:
    first = mw.plan(Net(), INPUTS, cluster="h100-sxm:2", mesh="2")
    second = mw.plan(Net(), INPUTS, cluster="h100-sxm:2", mesh="2", constraints=["up.weight = S(0)"])
    path = tmp_path / "plan.json"
    first.save(path)
    began = time.perf_counter()
    second.save(path)
    usual = time.perf_counter() - began
    draw = random.Random(count)
    for index in range(count):
        try:
            with interrupted_after(draw.uniform(1e-5, 1.5 * usual)):
                (first, second)[index % 2].save(path)
        except KeyboardInterrupt:
            pass
        assert Plan.load(path) in (first, second)
        assert os.listdir(tmp_path) == ["plan.json"]


def test_an_error_for_the_user_is_never_another_one() -> None:
    for request in (
        {"cluster": "h100"},
        {"mesh": "3"},
        {"optimizer": "x"},
        {"memory_limit_bytes": 0},
        {"recompute": "x"},
        {"solver": "x"},
    ):
        with pytest.raises(MeshwrightError):
            mw.plan(Net(), INPUTS, **({"cluster": "h100-sxm:2", "mesh": "2"} | request))  # type: ignore[arg-type]

"""What the command line says of small cases: sizes that a plan records, a pipeline of one rank, nothing that moves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from meshwright import Plan, cli, plan

SPEC = """
import torch
def build(batch=8, layers=1):
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(4, 4) for _ in range(layers)]
    return torch.nn.Sequential(*blocks), (torch.randn(batch, 4),), {}
"""


def test_a_plan_is_replayed_at_the_sizes_that_it_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    (tmp_path / "spec.py").write_text(SPEC)
    spec, first, second = (str(tmp_path / name) for name in ("spec.py", "first.json", "second.json"))
    assert run("plan", spec, "--cluster", "cpu:2", "--global-batch", "6", "-o", first)[0] == 0
    code, text, _ = run("replay", first, spec)
    assert code == 0 and "make the same choices" in text
    code, _, told = run("replay", first, spec, "--layers", "2")
    assert code == 2 and "names are as in the plan" in told and "carried over" not in told
    assert run("replay", first, spec, "--layers", "2", "--adapt", "-o", second)[0] == 0
    assert Plan.load(second).inputs[0].shape == (6, 4)
    code, text, _ = run("replan", first, "--health", "1=0", "--moves")
    assert code == 0 and ("nothing moves" in text) == ("    from" not in text)
    rows = run("recipes")[1].splitlines()
    assert len({len(row) - len(row.partition("  ")[2].lstrip()) for row in rows}) == 1


def test_a_pipeline_of_one_rank_is_the_plan_without_one() -> None:
    request = {"model": nn.Linear(4, 4), "args": (torch.randn(8, 4),), "cluster": "cpu:2"}
    found = plan(**request, pipeline="auto")
    assert found.pipeline is None and found.solver.gap <= 1e-3


def test_a_digest_does_not_tell_how_long_a_search_took() -> None:
    found = plan(nn.Linear(4, 4), (torch.randn(8, 4),), cluster="cpu:2")
    slower = msgspec.structs.replace(found, solver=msgspec.structs.replace(found.solver, seconds=9.0))
    other = msgspec.structs.replace(found, solver=msgspec.structs.replace(found.solver, choices=9))
    assert found.digest() == slower.digest() != other.digest()

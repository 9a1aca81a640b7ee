"""Published rows priced again: the accuracy that is promised, what is refused, and the statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import run
from meshwright.cost_models.repricing import kendall_tau, positive, source_name, statistics
from meshwright.cost_models.systems import find_system, load_systems
from meshwright.cost_models.validation import Report, read_table, reprice, validate
from meshwright.plans.errors import RequestError
from meshwright.validate_command import report_object

DATA = Path(__file__).resolve().parents[2] / "benchmarks" / "data"  # copied from the published tables, sources inside


@pytest.fixture(scope="module")
def collectives() -> Report:
    return validate(DATA / "published_collectives.csv")


@pytest.fixture(scope="module")
def kernels() -> Report:
    return validate(DATA / "published_kernels.csv")


def test_measured_collectives_from_64_kib_on_are_within_the_promise(collectives: Report) -> None:
    rows = [row for row in collectives.priced if row.evidence == "measured" and "64 KiB" not in row.kind]
    errors = statistics(row.error for row in rows)
    assert errors.rows > 200 and errors.median is not None and errors.mean is not None
    assert errors.median < 0.04 and errors.mean < 0.06


def test_rows_without_a_named_device_are_refused(collectives: Report) -> None:
    reasons = {refused.reason for refused in collectives.refused}
    assert "the device is not named" in reasons
    assert len(collectives.priced) + len(collectives.refused) == collectives.rows == 470


def test_kernels_are_within_the_promise(kernels: Report) -> None:
    assert kernels.errors.mean is not None and kernels.errors.mean < 0.04
    assert len(kernels.priced) == 120
    assert all("Gaudi" in refused.reason for refused in kernels.refused)


def test_group_of_unnamed_size_is_read_from_the_two_bandwidths() -> None:
    row = {"collective": "all_reduce", "system": "A100 multi-node", "payload_bytes": str(2**30), "n_gpus": "",
           "algbw_GBps": "48.59", "busbw_GBps": "94.15"}  # fmt: skip
    (priced,) = reprice([row]).priced
    assert priced.model == "all_reduce over 32" and abs(priced.error) < 0.05


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"collective": "gossip"}, "no price"),
        ({"system": "abacus"}, "no device sheet"),
        ({"n_gpus": ""}, "neither n_gpus"),
        ({"time_us": ""}, "a time"),
        ({"n_nodes": "1", "n_gpus": "64"}, "do not fit"),
        ({"system": "MI200 node", "n_gpus": "6"}, "not measured"),
    ],
)
def test_what_a_collective_row_does_not_say_is_named(change: dict[str, str], reason: str) -> None:
    row = {"collective": "all_reduce", "system": "8x A100", "n_gpus": "8", "n_nodes": "1", "payload_bytes": "1048576",
           "time_us": "102"}  # fmt: skip
    assert not reprice([row]).refused
    (refused,) = reprice([{**row, **change}]).refused
    assert reason in refused.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "abacus"}, "no device sheet"),
        ({"tflops": "n/a"}, "TFLOP/s"),
        ({"kind": "sort"}, "not known"),
        ({"shape": "large"}, "MxNxK"),
        ({"dtype": "fp8"}, "no matrix units"),
    ],
)
def test_what_a_kernel_row_does_not_say_is_named(change: dict[str, str], reason: str) -> None:
    row = {"kind": "gemm", "gpu": "NVIDIA A100 PCIe", "impl": "torch", "dtype": "bf16",
           "shape": "MxNxK=2048x5120x6144", "tflops": "252.9"}  # fmt: skip
    assert not reprice([row]).refused
    (refused,) = reprice([{**row, **change}]).refused
    assert reason in refused.reason


def test_unknown_table_and_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("name,age\nmesh,3\n", encoding="utf-8")
    with pytest.raises(RequestError, match="columns of a known kind"):
        validate(path)
    with pytest.raises(RequestError, match="readable CSV"):
        read_table(tmp_path / "nothing.csv")


def test_tables_in_other_words_and_with_other_dividers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        "Op;Cluster;GPUs;Nodes;Size (bytes);time_us\nnccl allReduce_perf;8x A100;8;1;1,048,576;102\n\n", "utf-8"
    )
    (priced,) = validate(path).priced
    assert priced.kind == "all_reduce"
    path.write_text("gpu,device,n_gpus\nH100,H100,8\n", "utf-8")
    with pytest.raises(RequestError, match="twice"):
        validate(path)
    path.write_text('model,gpu,n_gpus\n"a', "utf-8")
    assert validate(path).refused
    path.write_bytes(b"model,gpu\0,n_gpus\n\xff")
    with pytest.raises(RequestError, match="readable CSV"):
        validate(path)


def test_systems_are_found_by_the_names_that_tables_give() -> None:
    systems = load_systems()
    names = {"DGX-GB300": "gb300", "8x H200 NVLink4": "h200", "NVIDIA GH200 SXM": "gh200", "a100_40gb": "a100-40gb",
             "H100 80GB SXM5": "h100", "V100 (AWS p3.16xlarge)": "v100"}  # fmt: skip
    for text, name in names.items():
        system = find_system(systems, text)
        assert system is not None and system.name == name
    assert find_system(systems, "abacus") is None


def test_kendall_tau_counts_pairs() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 1], [1, 2]) is None


def test_statistics_and_cells() -> None:
    found = statistics([0.1, -0.2, 0.3])
    assert (found.mean, found.median, found.bias) == pytest.approx((0.2, 0.2, 0.2 / 3))
    assert statistics([]).mean is None
    assert positive("1,024") == 1024.0 and positive("") is None and positive("-1") is None and positive("nan") is None
    assert source_name({"source": "github:a/b README.md:12 @0123abc"}) == "github:a/b README.md"


def test_command_prints_tables_and_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(DATA / "published_kernels.csv")
    assert run(["validate", path, "--rows"]) == 0
    text = capsys.readouterr().out
    assert "kernels: 120 of 122 rows priced" in text and "refused" in text
    found = report_object(validate(path), each=True)
    found = json.loads(json.dumps(found, allow_nan=False))
    keys = {"rows", "covered", "mean_abs_error", "median_abs_error", "p90_abs_error", "kendall_tau", "by_source"}
    assert keys | {"refused"} <= set(found) and len(found["priced"]) == found["covered"]

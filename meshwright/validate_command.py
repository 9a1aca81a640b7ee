"""`meshwright validate`: published rows against the prices that plans are made with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

import click

from .cli_output import put_json, put_text

if TYPE_CHECKING:
    from .planner.validation import Report, Statistics

__all__ = ["validate_command"]

_KEYS = ("source", "model", "device", "kind", "evidence")


@click.command("validate")
@click.argument("path", metavar="FILE.csv")
@click.option("--rows", "each", is_flag=True, help="Print every row as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_obj
def validate_command(stream: TextIO, path: str, each: bool, as_json: bool) -> int:
    """Price published or your own measurements.

    FILE.csv is a table of training throughputs, collectives or kernels; its columns say which.
    """
    from .planner.validation import validate

    report = validate(path)
    if as_json:
        put_json(stream, report_object(report, each=each))
    else:
        put_text(stream, report_text(report, each=each))
    return 0


def report_object(report: Report, *, each: bool) -> dict[str, Any]:
    """What `validate --json` says."""
    errors = report.errors
    found: dict[str, Any] = {
        "table": report.table,
        "rows": report.rows,
        "covered": len(report.priced),
        "mean_abs_error": errors.mean,
        "median_abs_error": errors.median,
        "p90_abs_error": errors.p90,
        "memory_rows": report.memory_errors.rows,
        "memory_mean_abs_error": report.memory_errors.mean,
        "kendall_tau": report.kendall_tau,
        "groups": [
            {"group": tau.group, "rows": tau.rows, "kendall_tau": tau.tau, "kendall_tau_apart": tau.tau_apart}
            for tau in report.taus
        ],
        "refused": [{"row": refused.row, "reason": refused.reason} for refused in report.refused],
    }
    for key in _KEYS:
        found[f"by_{key}"] = {name: _fields(part) for name, part in report.by(key).items()}
    if each:
        found["priced"] = [
            {
                "row": row.row,
                "published_s": row.published_s,
                "predicted_s": row.predicted_s,
                "published_bytes": row.published_bytes,
                "predicted_bytes": row.predicted_bytes,
                "terms": dict(row.terms),
            }
            for row in report.priced
        ]
    return found


def _fields(part: Statistics) -> dict[str, float | int | None]:
    return {
        "rows": part.rows,
        "mean_abs_error": part.mean,
        "median_abs_error": part.median,
        "p90_abs_error": part.p90,
        "bias": part.bias,
    }


def report_text(report: Report, *, each: bool) -> str:
    """The report as lines of text; rows are counted from 1, without the header."""
    errors, memory = report.errors, report.memory_errors
    lines = [f"{report.table}: {len(report.priced)} of {report.rows} rows priced"]
    if errors.rows:
        lines.append("error of the time: " + _line(errors))
    if memory.rows:
        lines.append(f"error of the memory: {_line(memory)} ({memory.rows} rows)")
    for key in _KEYS:
        lines += ["", f"by {key}"]
        lines += [f"  {part.rows:4d} rows  {_line(part)}  {_short(name)}" for name, part in report.by(key).items()]
    if report.taus:
        lines += ["", "rank correlation (Kendall's tau; of pairs over 2 % apart) in groups of 5 and more, "
                  f"mean {report.kendall_tau:.2f}"]  # fmt: skip
        lines += [f"  {t.tau:5.2f}  {_tau(t.tau_apart)}  {t.rows:3d} rows  {t.group}" for t in report.taus]
    if each:
        lines += ["", "row, published s, predicted s, error"]
        lines += [f"  {r.row:4d}  {r.published_s:10.4g}  {r.predicted_s:10.4g}  {r.error:+7.1%}" for r in report.priced]
    if report.refused:
        lines += ["", "refused"]
        lines += [f"  row {refused.row}: {refused.reason}" for refused in report.refused]
    return "\n".join(lines)


def _line(part: Statistics) -> str:
    shares = (part.mean, part.median, part.p90)
    mean, median, p90 = (0.0 if share is None else share for share in shares)
    return f"mean {mean:6.1%}  median {median:6.1%}  p90 {p90:6.1%}  bias {part.bias or 0.0:+6.1%}"


def _tau(tau: float | None) -> str:
    return "    -" if tau is None else f"{tau:5.2f}"


def _short(name: str) -> str:
    return name if len(name) <= 90 else name[:87] + "..."

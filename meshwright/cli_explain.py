"""Commands that answer questions: why a plan is as it is, and which models there are."""

from __future__ import annotations

import dataclasses
from typing import Any, TextIO

import click
import msgspec

from .cli_output import put_json, put_text
from .plans import Explanation, Plan

__all__ = ["explain_command", "specs_command"]

_LIMITS = "limits"


@click.command("explain")
@click.argument("plan_path", metavar="PLAN")
@click.argument("name", required=False)
@click.argument("spec", required=False)
@click.option("--layout", help="Ask for this layout, e.g. 'S(0),R', and not for the next best one.")
@click.option("--more-memory", default="8GiB", show_default=True, help="How much more memory per device to try.")
@click.option("--limits", is_flag=True, help="With NAME: also say what the limits cost.")
@click.option("--price", help="Say how the price of this op comes about: terms, parameters, sources.")
@click.option("--overlap", is_flag=True, help="Run the step on streams: what is hidden, what waits.")
@click.option("--prefetch", type=click.IntRange(0, 1000), help="With --overlap: gathers started so many ahead.")
@click.option("--bucket", help="With --overlap: gradients joined up to this size, e.g. 25MiB.")
@click.option("--calibration", help="The file that PLAN was priced with, where it cites one.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True, max=1e6), default=60.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_obj
def explain_command(
    stream: TextIO,
    plan_path: str,
    name: str | None,
    spec: str | None,
    layout: str | None,
    more_memory: str,
    limits: bool,
    price: str | None,
    overlap: bool,
    prefetch: int | None,
    bucket: str | None,
    calibration: str | None,
    time_limit: float,
    as_json: bool,
) -> int:
    """Say why a plan is as it is.

    NAME is a parameter, input, output or op of PLAN; `*` matches. Its layout is excluded and the model is planned
    again: that is the next best, and what it would cost. Without NAME, or with `limits` for it: what the memory limit
    and each constraint cost. With --price OP (and SPEC in the place of NAME) only how that op's price comes about; with
    --overlap (likewise) the step simulated on streams. The model is the one that PLAN records, or that of SPEC.
    """
    from .cli import _requests, parse_bytes

    plan = Plan.load(plan_path)
    if price is not None:
        note = _requests().price_spec(plan, price, spec or name, calibration=calibration)
        if as_json:
            put_json(stream, dataclasses.asdict(note))
        else:
            put_text(stream, str(note))
        return 0
    if overlap or prefetch is not None or bucket is not None:
        size = 0 if bucket is None else parse_bytes("--bucket", bucket)
        other = (1 if prefetch is None else prefetch, size)
        asked = {} if other == (1, 0) else {"cases": ((1, 0), other)}
        run = _requests().streams_spec(plan, spec or name, calibration=calibration, **asked)
        if as_json:
            put_json(stream, dataclasses.asdict(run))
        else:
            put_text(stream, str(run))
        return 0
    names = [] if name is None or name == _LIMITS else [name]
    found = _requests().explain_spec(
        plan,
        names,
        spec,
        layout=layout,
        more_memory_bytes=parse_bytes("--more-memory", more_memory),
        limits=limits or not names,
        time_limit_s=time_limit,
        calibration=calibration,
    )
    if as_json:
        put_json(stream, explanation_object(found))
    else:
        put_text(stream, str(found))
    return 0


def explanation_object(found: Explanation) -> dict[str, Any]:
    """What `explain --json` says."""
    return msgspec.to_builtins(found)


@click.command("specs")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_obj
def specs_command(stream: TextIO, as_json: bool) -> int:
    """List the built-in models."""
    from .specs.builtin import spec_rows

    rows = spec_rows()
    if as_json:
        put_json(stream, {"specs": rows})
        return 0
    lines = [f"{'name':<14} {'family':<8} {'layers':>6} {'width':>6} {'dtype':<9} {'global batch':>12} {'seq len':>8}"]
    for row in rows:
        length = row["seq_len"] or "images"
        lines.append(
            f"{row['name']:<14} {row['family']:<8} {row['layers']:>6} {row['width']:>6} {row['dtype']:<9} "
            f"{row['global_batch']:>12} {length:>8}"
        )
    put_text(stream, "\n".join(lines))
    return 0

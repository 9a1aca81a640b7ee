"""`meshwright replan`: a plan again for the devices that are left; only this file prints for it."""

from __future__ import annotations

from typing import Any, TextIO

import click

from .cli_output import Usage, plan_object, put_json, put_text
from .plans import Health, Migration, Plan, Replacement, RequestError
from .plans.words import bytes_words

__all__ = ["replan_command"]

# Rows of a table that are shown; --json has them all.
_SHOWN = 20


@click.command("replan")
@click.argument("plan_path", metavar="PLAN")
@click.argument("spec", required=False)
@click.option("--health", multiple=True, help="DEVICE=SPEED, 0 dead to 1 healthy, e.g. 17=0; may be repeated.")
@click.option("--horizon", type=click.FloatRange(min=0, min_open=True), help="Seconds to the next failure.")
@click.option("--tries", type=click.IntRange(min=1, max=64), default=4, show_default=True, help="Meshes to solve for.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True, max=1e6), default=60.0, show_default=True)
@click.option("--moves", is_flag=True, help="Show what moves from which device to which, and what nobody holds.")
@click.option("-o", "--output", help="Write the plan file here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_obj
def replan_command(
    stream: TextIO,
    plan_path: str,
    spec: str | None,
    health: tuple[str, ...],
    horizon: float | None,
    tries: int,
    time_limit: float,
    moves: bool,
    output: str | None,
    as_json: bool,
) -> int:
    """Plan again for the devices that are left.

    Devices are the ranks of PLAN. The model is the one that PLAN records, or that of SPEC.
    """
    from .requests import replan

    usage = Usage.begin()
    if not health:
        raise RequestError("'--health' must say what is wrong, got nothing; add e.g. --health 17=0 --health 23=0.6")
    plan = Plan.load(plan_path)
    found = replan(plan, Health.parse(list(health)), spec=spec, horizon_s=horizon, tries=tries, time_limit_s=time_limit)
    if output is not None:
        found.plan.save(output)
    if as_json:
        put_json(stream, {**_object(found, usage, output), **(_moves_object(found.migration) if moves else {})})
    else:
        ends = [f"written to {output}"] if output is not None else []
        put_text(stream, "\n\n".join([str(found), *([_moves_text(found.migration)] if moves else []), *ends]))
    return 0


def _object(found: Replacement, usage: Usage, output: str | None) -> dict[str, Any]:
    return {
        **plan_object(found.plan, usage),
        "step_time_s": found.step_time_s,
        "plan": output,
        "devices": list(found.devices),
        "idle": list(found.idle),
        "migration_bytes": found.migration_bytes,
        "migration_s": found.migration_s,
        "missing_bytes": found.missing_bytes,
        "tried": [{"mesh": mesh, "step_time_s": seconds} for mesh, seconds in found.tried],
    }


def _moves_object(migration: Migration) -> dict[str, Any]:
    """Bytes by donor and receiver, and by tensor of what nobody holds."""
    return {
        "kept_bytes": migration.kept_bytes,
        "moves": [
            {"donor": donor, "receiver": receiver, "bytes": size}
            for (donor, receiver), size in sorted(migration.between().items())
        ],
        "missing": [{"name": name, "bytes": size} for name, size in sorted(_missing(migration).items())],
    }


def _moves_text(migration: Migration) -> str:
    rows = sorted(migration.between().items(), key=lambda row: (-row[1], row[0]))
    lines = [f"kept in place   {bytes_words(migration.kept_bytes)}", ""]
    lines += [f"{'from':>8} {'to':>8}  bytes"] if rows else ["nothing moves"]
    lines += [f"{donor:>8} {receiver:>8}  {bytes_words(size)}" for (donor, receiver), size in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        lines.append(f"... and {len(rows) - _SHOWN} more, {bytes_words(sum(size for _, size in rows[_SHOWN:]))}")
    missing = sorted(_missing(migration).items(), key=lambda row: (-row[1], row[0]))
    if missing:
        lines += ["", "nobody that lives holds"]
        lines += [f"  {name:<48} {bytes_words(size)}" for name, size in missing[:_SHOWN]]
        lines += [f"  ... and {len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
    return "\n".join(lines)


def _missing(migration: Migration) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece in migration.missing:
        found[piece.name] = found.get(piece.name, 0) + piece.size_bytes
    return found

"""`meshwright simulate --failures`: weeks of a job's life by several policies; only this file prints for it."""

from __future__ import annotations

from typing import Any, TextIO

from .cli_output import Usage, put_json, put_text
from .plans import Infeasible, RequestError

__all__ = ["simulate_failures"]

_DAY_S = 86400.0
_MOST_WEEKS = 520


def simulate_failures(
    stream: TextIO,
    job_text: str,
    *,
    weeks: float,
    rates_name: str,
    policies: str | None,
    spares: int,
    slow: bool,
    seed: int,
    as_json: bool,
) -> int:
    """Live through the same failures by each policy, and print a table."""
    from .planner.lifetime import POLICY_NAMES, Rates, compared, events_of, load_job

    usage = Usage.begin()
    names = list(POLICY_NAMES) if policies is None else policies.split(",")
    unknown = [name for name in names if name not in POLICY_NAMES]
    if unknown:
        raise RequestError(f"'--policies' must be of {', '.join(POLICY_NAMES)}, got {unknown[0][:60]!r}")
    if not 0 < weeks <= _MOST_WEEKS:
        raise RequestError(f"'--weeks' must be above 0 and at most {_MOST_WEEKS} (ten years), got {weeks:g}")
    job = load_job(job_text, spares=spares)
    rates = Rates.load(rates_name, slow=slow)
    span_s = weeks * 7 * _DAY_S
    events = events_of(job, rates, span_s, seed)
    lives = compared(job, rates, events, span_s, names)
    if all(life.goodput == 0.0 for life in lives):
        raise Infeasible(
            f"'--failures' must be a job that runs while nothing is broken, got {job_text[:60]}, which no policy could "
            "run: it does not fit the memory of its devices; use more of them"
        )
    counts = {
        "dead": sum(event.speed == 0 and bool(event.devices) for event in events),
        "slow": sum(event.speed > 0 for event in events),
        "job": sum(not event.devices for event in events),
    }
    if as_json:
        rows: list[dict[str, Any]] = [
            {name: getattr(life, name) for name in ("policy", "goodput", "stopped", "paused", "changes")}
            for life in lives
        ]
        put_json(stream, {"status": "ok", "devices": job.devices, "events": counts, "policies": rows,
                          "rates": rates.source, **usage.fields()})  # fmt: skip
        return 0
    lines = [
        f"devices         {job.devices}, {job.tensor} x {job.replicas} x {job.stages} (tensor, replicas, stages)",
        f"events          {counts['dead']} devices or nodes lost, {counts['slow']} slow-downs, {counts['job']} stops of"
        f" the job alone, in {weeks:g} weeks",
        f"rates           {rates.name}",
        "",
        f"{'policy':<12} {'goodput':>8} {'stopped':>8} {'paused':>8} {'changes':>8}",
        *(
            f"{life.policy:<12} {life.goodput:>8.1%} {life.stopped:>8.1%} {life.paused:>8.2%} {life.changes:>8}"
            for life in lives
        ),
    ]
    put_text(stream, "\n".join(lines))
    return 0

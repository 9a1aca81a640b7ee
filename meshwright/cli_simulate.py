"""`meshwright simulate`: the pipeline alone, from a layer profile or from fixed stages; only this file prints for
it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from .cli_output import put_json, put_text
from .plans import Plan, RequestError
from .plans.words import bytes_words

if TYPE_CHECKING:
    from .planner.pipeline import LayerProfile, StageRow, Tuned

__all__ = ["simulate_command"]

_COUNT = click.IntRange(min=1, max=2**20)
# A click range lets nan pass, since it is on neither side of its ends.
_LARGEST = 1e15
# Stages of a schedule that one command draws and searches.
_MOST_ACTIONS = 2**16


class _Number(click.FloatRange):
    """A number from 0 to 1e15, and not nan."""

    def __init__(self) -> None:
        super().__init__(min=0, max=_LARGEST)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; click's own error for anything else."""
        found = super().convert(value, param, ctx)
        if isinstance(found, float) and math.isnan(found):
            self.fail(f"must be a number from 0 to {_LARGEST:g}, got nan; leave it out for the default", param, ctx)
        return found


_NUMBER = _Number()


@click.command("simulate")
@click.argument("plan", required=False)
@click.option("--profile", help="FILE.json or FILE.json:NAME, what each layer costs.")
@click.option("--stage-costs", help="FILE.json or FILE.json:ROW, stages that are fixed on their ranks.")
@click.option("--schedule", help="auto, or 1f1b, interleaved:2, zb-h1, ...  [default: auto; of a plan its own]")
@click.option("--pp", type=_COUNT, help="Ranks of the pipeline.  [default: the file's]")
@click.option("--microbatches", type=_COUNT, help="Micro-batches of a step.  [default: the file's]")
@click.option("--layers", type=_COUNT, help="Repeat or shorten the profile's pattern to so many layers.")
@click.option("--pattern", help="Symbols of the layers in order, where the profile has none.")
@click.option("--partition", help="Layers per stage, e.g. 14,14,14,14.  [default: searched, or equal]")
@click.option("--placement", help="Rank per stage of that partition, e.g. 0,1,1,0.")
@click.option(
    "--memory", help="Limit per rank in the memory unit, '1f1b' for what 1F1B takes, or 'none'.  [default: the file's]"
)
@click.option("--delay", type=_NUMBER, help="Time from one rank to another.  [default: the file's]")
@click.option("--overhead", type=_NUMBER, default=0.0, help="Time added to every action.")
@click.option("--tick", type=_NUMBER, help="Round each layer's times to whole ticks of so much; results are in ticks.")
@click.option("--time-limit", type=_NUMBER, help="CPU seconds for the search.  [default: 4 to 50, by the size]")
@click.option("--seed", type=click.IntRange(min=0, max=2**31), default=0, show_default=True)
@click.option("--svg", help="Write the schedule as a picture here.")
@click.option("--trace", help="Write the schedule as a Chrome/Perfetto trace here.")
@click.option("--failures", help="MODEL:TPxDPxPP, e.g. llama2-13b:4x16x4, or a job's .json: live through failures.")
@click.option("--weeks", type=_NUMBER, default=4.0, show_default=True, help="With --failures: how long.")
@click.option("--rates", default="llama3-405b", show_default=True, help="With --failures: how often what fails.")
@click.option("--policies", help="With --failures: e.g. restart,recycle,ours.  [default: all]")
@click.option("--spares", type=click.IntRange(min=0, max=2**20), default=0, help="With --failures: spare devices.")
@click.option("--no-slow", is_flag=True, help="With --failures: no slow-downs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_obj
def simulate_command(
    stream: TextIO,
    plan: str | None,
    profile: str | None,
    stage_costs: str | None,
    svg: str | None,
    trace: str | None,
    failures: str | None,
    weeks: float,
    rates: str,
    policies: str | None,
    spares: int,
    no_slow: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Simulate a pipeline without its model.

    From the file of a PLAN with a pipeline, from a layer profile, or from fixed stages; with --schedule auto the best
    partition (of a profile), placement and order are searched. Or, with --failures, the weeks of a job whose devices
    fail and slow down by published rates, by our replanning and by the policies of others.
    """
    if failures is not None:
        from .cli_failures import simulate_failures

        if any(one is not None for one in (plan, profile, stage_costs)):
            raise RequestError("'--failures' must be given without a PLAN, --profile or --stage-costs, got one too")
        return simulate_failures(
            stream, failures, weeks=weeks, rates_name=rates, policies=policies, spares=spares, slow=not no_slow,
            seed=options["seed"], as_json=as_json,
        )  # fmt: skip
    # Loading and compiling count against the time limit, too.
    options["begin_s"] = time.process_time()
    given = [one for one in (plan, profile, stage_costs) if one is not None]
    if len(given) != 1:
        raise RequestError(
            f"'simulate' must have one of PLAN, --profile, --stage-costs and --failures, got {len(given)} of them; "
            "give one"
        )
    layers: LayerProfile | None = None
    if plan is not None:
        found = _from_plan(plan, options)
    else:
        options["schedule"] = options["schedule"] or "auto"
        from_file = _from_stages if profile is None else _from_profile
        found, layers = from_file(given[0], options)
    from .plans import schedule_svg, schedule_text, schedule_trace

    simulation = found.simulation
    timeline = simulation.timeline
    if svg is not None:
        _write(svg, schedule_svg(timeline, memory=simulation.memory, limits=found.limits))
    if trace is not None:
        _write(trace, schedule_trace(predicted=timeline, memory=simulation.memory))
    if as_json:
        put_json(stream, _object(found, layers, options["schedule"]))
    else:
        put_text(stream, f"{schedule_text(timeline)}\n\n{_summary(found, layers, planned=plan is not None)}")
    return 0


def _from_plan(path: str, options: dict[str, Any]) -> Tuned:
    """The plan's pipeline by its own schedule, or its stages by another; seconds and bytes."""
    from .planner.pipeline import simulate_plan

    for name in ("pp", "microbatches", "layers", "pattern", "partition", "placement", "tick", "delay"):
        if options[name] is not None:
            raise RequestError(f"'--{name}' must be left to the plan, got it with one; change the plan instead")
    plan = Plan.load(path)
    if plan.pipeline is None:
        raise RequestError(f"'plan' must have a pipeline to be simulated, got {path} without; plan with --pipeline")
    if options["memory"] is not None and (options["memory"] == "1f1b" or options["schedule"] != "auto"):
        raise RequestError(
            "'--memory' must be a number of bytes and come with --schedule auto for a plan, whose own schedule is "
            "as it is"
        )
    limit = _limit(options["memory"], None, None)
    clock = _clock(options["time_limit"], 4.0, options["begin_s"])
    options["schedule"] = options["schedule"] or "the plan's"
    return simulate_plan(
        plan.pipeline,
        None if options["schedule"] == "the plan's" else options["schedule"],
        memory_limit=limit,
        clock=clock,
        seed=options["seed"],
    )


def _from_stages(text: str, options: dict[str, Any]) -> tuple[Tuned, LayerProfile | None]:
    from .planner.pipeline import load_stage_row, simulate_stages

    for name in ("layers", "pattern", "partition", "placement", "tick"):
        if options[name] is not None:
            raise RequestError(f"'--{name}' must be given with --profile only, got it with --stage-costs; leave it out")
    row: StageRow = load_stage_row(
        text,
        ranks=options["pp"],
        microbatches=options["microbatches"],
        delay=options["delay"],
        overhead=options["overhead"],
    )
    memory = row.one_f_one_b_memory if options["memory"] == "1f1b" else None
    limit = _limit(options["memory"], row.memory_limit, memory)
    clock = _clock(options["time_limit"], 4.0, options["begin_s"])
    return simulate_stages(row, options["schedule"], memory_limit=limit, clock=clock, seed=options["seed"]), None


def _from_profile(text: str, options: dict[str, Any]) -> tuple[Tuned, LayerProfile | None]:
    from .planner.pipeline import load_profile, simulate_profile

    profile = load_profile(
        text, layers=options["layers"], pattern=options["pattern"], tick=options["tick"], delay=options["delay"]
    )
    ranks = _given("pp", options["pp"] or profile.ranks)
    microbatches = _given("microbatches", options["microbatches"] or profile.microbatches)
    if ranks * microbatches > _MOST_ACTIONS:
        raise RequestError(
            f"'--pp' times '--microbatches' must be at most {_MOST_ACTIONS}, got {ranks} x {microbatches}; a schedule "
            "repeats itself long before, use fewer micro-batches"
        )
    memory = profile.one_f_one_b_memory(ranks, microbatches) if options["memory"] == "1f1b" else None
    found = simulate_profile(
        profile,
        options["schedule"],
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=_limit(options["memory"], profile.memory_limit, memory),
        overhead=options["overhead"],
        layers=_numbers("partition", options["partition"]),
        placement=_numbers("placement", options["placement"]),
        clock=_clock(options["time_limit"], _default_limit_s(ranks, microbatches), options["begin_s"]),
        seed=options["seed"],
    )
    return found, profile


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise RequestError(f"'--{name}' must be given where the profile does not say it, got none; add e.g. --{name} 4")
    return value


def _clock(limit_s: float | None, default_s: float, begin_s: float) -> Any:
    from .planner.pipeline import Clock

    return Clock(limit_s=default_s if limit_s is None else limit_s, begin_s=begin_s)


def _default_limit_s(ranks: int, microbatches: int) -> float:
    """8 s for 4 ranks and 8 micro-batches, growing with the root of their number, to 50 s."""
    return min(50.0, 8.0 * math.sqrt(max(1.0, ranks * microbatches / 32)))


def _limit(text: str | None, given: float | None, one_f_one_b: float | None) -> float | None:
    if text is None:
        return given
    if text == "none":
        return None
    if text == "1f1b":
        return one_f_one_b
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise RequestError(f"'--memory' must be a positive number, '1f1b' or 'none', got {text[:60]!r}")
    return limit


def _numbers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(
            f"'--{name}' must be whole numbers with commas between, e.g. 2,2,1, got {text[:60]!r}"
        ) from None


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"'file' must be one that can be written, got {path} ({error})") from None


def _object(found: Tuned, layers: LayerProfile | None, name: str) -> dict[str, Any]:
    simulation, schedule = found.simulation, found.schedule
    bubbles = simulation.bubbles
    partition = None if layers is None or found.cuts is None else list(layers.layers_of(found.cuts))
    actions = [[[str(one.action), one.start, one.end] for one in row] for row in simulation.timeline]
    return {
        "status": "ok" if found.fits else "over_memory",
        "schedule": name,
        "makespan": simulation.makespan,
        "longest_stage_time": simulation.longest_stage_time,
        "step_time": simulation.step_time,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "bubble_fraction": found.bubble_fraction,
        "bubbles": [{"warmup": b.warmup, "residual": b.residual, "cooldown": b.cooldown} for b in bubbles],
        "peak_memory_per_rank": list(simulation.peak_memory),
        "memory_limit": None if found.limits is None else max(found.limits),
        "unit": None if layers is None else layers.unit,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "partition": partition,
        "stages": None if layers is None or found.cuts is None else list(layers.symbols_of(found.cuts)),
        "placement": list(schedule.placement),
        "stage_costs": {
            "F": list(found.costs.forward),
            "B": list(found.costs.input_gradient),
            "W": list(found.costs.weight_gradient),
            "comm": found.costs.delay,
        },
        "actions": actions,
        "critical_path": [[rank, str(one.action)] for rank, one in simulation.critical_path],
        "progress": [list(point) for point in found.progress],
        "search_cpu_s": found.search_cpu_s,
    }


def _summary(found: Tuned, layers: LayerProfile | None, *, planned: bool) -> str:
    simulation = found.simulation
    unit = " s" if planned else f" {layers.unit}" if layers is not None and layers.unit else ""
    # Of a plan memory is in bytes, else in the unit of the numbers that are given.
    size: Callable[[float], str] = (lambda n: bytes_words(round(n))) if planned else "{:g}".format
    # What comes after a rank's last action, reducing and updating, is in the step and in its bound.
    after = [f"step            {simulation.step_time:.6g}{unit}"] if simulation.step_time > simulation.makespan else []
    lines = [
        f"makespan        {simulation.makespan:.6g}{unit}",
        *after,
        f"lower bound     {found.lower_bound:.6g}{unit} (gap {found.gap:.2%} of these stages in their places)"
        if planned
        else f"lower bound     {found.lower_bound:.6g} (gap {found.gap:.2%})",
        f"bubble          {found.bubble_fraction:.2%}",
        f"peak memory     {(', ' if planned else ' ').join(size(peak) for peak in simulation.peak_memory)}"
        + ("" if found.limits is None else f" of {size(max(found.limits))}{'' if found.fits else ', too much'}"),
        f"placement       {' '.join(map(str, found.schedule.placement))}",
    ]
    if layers is not None and found.cuts is not None:
        lines.append(f"stages          {' '.join(layers.symbols_of(found.cuts))}")
    return "\n".join([*lines, f"searched        {found.search_cpu_s:.1f} CPU s"])

"""The command line. Exit codes: 0 done, 2 the request is wrong, 3 no plan satisfies the limits, 1 anything else.

Only this file prints. Torch and the planner are loaded inside the commands that need them.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from .calibrate_command import calibrate_command
from .cli_explain import explain_command, specs_command
from .cli_output import (
    Usage,
    adapted,
    batch_notes,
    diff_object,
    held_stdout,
    plan_object,
    progress_line,
    put_json,
    put_text,
)
from .cli_replan import replan_command
from .cli_simulate import simulate_command
from .plans import RECIPES, VERSION, CheckError, Cluster, Infeasible, Mesh, MeshwrightError, Plan, RequestError
from .run_command import members_command, run_command
from .validate_command import validate_command

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["app", "parse_bytes", "run"]

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
_SIZE = click.IntRange(min=1, max=2**31)


def run(arguments: Sequence[str]) -> int:
    """Run one command; the exit code."""
    as_json = "--json" in arguments
    with held_stdout(as_json) as stream:
        try:
            return int(app.main(list(arguments), prog_name="meshwright", standalone_mode=False, obj=stream) or 0)
        except MeshwrightError as error:
            more = {"conflict": msgspec.to_builtins(error.conflict)} if isinstance(error, Infeasible) else {}
            return _fail(stream, as_json, str(error), error.exit_code, _status(error), more)
        except click.ClickException as error:
            return _fail(stream, as_json, error.format_message(), error.exit_code, "refused")
        except (click.Abort, KeyboardInterrupt):
            return _fail(stream, as_json, "interrupted", 130, "interrupted")
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1


def _status(error: MeshwrightError) -> str:
    if isinstance(error, Infeasible):
        return "infeasible"
    return "unequal" if isinstance(error, CheckError) else "refused"


def _fail(
    stream: TextIO, as_json: bool, message: str, code: int, status: str, more: dict[str, Any] | None = None
) -> int:
    print(f"meshwright: {message}", file=sys.stderr)
    if as_json:
        put_json(stream, {"status": status, "error": message, "exit_code": code, **(more or {})})
    return code


def _requests() -> ModuleType:
    from . import requests

    return requests


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(VERSION, prog_name="meshwright")
def app() -> None:
    """Plan how a PyTorch model is split over a cluster, and run it.

    SPEC is a built-in model (llama3-8b, ...), FILE.py:function, or an HF config.json.
    """


def count_or_auto(option: str, text: str | None) -> int | str | None:
    """A number from 1 up, or 'auto'."""
    if text is None or text == "auto":
        return text
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise RequestError(f"'{option}' must be a whole number from 1 up, or auto, got {text[:60]!r}")
    return int(text)


def _model_options(command: Any) -> Any:
    """The options that say how large the model's inputs are and how much of the model is taken."""
    for option in (
        click.option("--layers", type=_SIZE, help="Take only so many of the repeated blocks."),
        click.option("--seq-len", type=_SIZE, help="Tokens in one sequence."),
        click.option("--global-batch", type=_SIZE, help="Samples in one step over all devices."),
    ):
        command = option(command)
    return command


app.add_command(simulate_command)
app.add_command(calibrate_command)


@app.command("plan")
@click.argument("spec")
@click.option("--cluster", required=True, help="h100-sxm:16x8, h100-sxm:8, a .toml or .json file, or 'local'.")
@click.option("--mesh", help="8, 8x8 or dp=8,tp=8; 4/2x2: one for each pipeline rank.  [default: chosen]")
@_model_options
@click.option("--memory-limit", help="Bytes per device, e.g. 80GiB.  [default: the device's memory]")
@click.option("--constraint", "constraints", multiple=True, help="A choice that is fixed; may be repeated.")
@click.option("--recipe", help="A named way of splitting, e.g. fsdp+tp; `meshwright recipes` lists them.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, sgd, sgd-momentum or none.")
@click.option(
    "--recompute", type=click.Choice(["auto", "none", "pointwise", "block"]), default="auto", show_default=True
)
@click.option("--eager", is_flag=True, help="Price a program that is not compiled.")
@click.option("--replicate", multiple=True, help="An op that is to run whole everywhere.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds for the solver.")
@click.option(
    "--gap",
    type=click.FloatRange(min=0, max=1),
    default=1e-3,
    show_default=True,
    help="Stop this near to the bound, relatively.",
)
@click.option("--pipeline", help="How many pipeline ranks, or auto; --mesh is then that of one rank.")
@click.option("--microbatches", help="Parts that the batch is run in, or auto.  [default: auto with a pipeline]")
@click.option(
    "--schedule", default="auto", show_default=True, help="Of a pipeline: auto, 1f1b, interleaved:2, zb-h1..."
)
@click.option("--warm", help="Start the search from this plan.")
@click.option("--cache", help="A folder of solved plans: the same problem is not solved twice.")
@click.option("--calibration", help="Price with this file of `meshwright calibrate`.")
@click.option("-o", "--output", help="Write the plan file here.")
@_JSON
@click.pass_obj
def plan_command(
    stream: TextIO,
    spec: str,
    cluster: str,
    mesh: str | None,
    global_batch: int | None,
    seq_len: int | None,
    layers: int | None,
    memory_limit: str | None,
    constraints: tuple[str, ...],
    recipe: str | None,
    optimizer: str,
    recompute: str,
    eager: bool,
    replicate: tuple[str, ...],
    time_limit: float | None,
    gap: float,
    pipeline: str | None,
    microbatches: str | None,
    schedule: str,
    warm: str | None,
    cache: str | None,
    calibration: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Find the best plan for SPEC."""
    usage = Usage.begin()
    if math.isnan(gap):
        raise RequestError("'--gap' must be a number from 0 to 1, got nan; leave it out for 0.001")
    if time_limit is not None and not time_limit < math.inf:
        raise RequestError(f"'--time-limit' must be a number of seconds, got {time_limit}; leave it out for 60")
    request = {
        "cluster": Cluster.local() if cluster == "local" else Cluster.parse(cluster),
        "mesh": None if mesh is None else Mesh.parse_each(mesh),
        "memory_limit_bytes": None if memory_limit is None else parse_bytes("--memory-limit", memory_limit),
    }
    with progress_line(sys.stderr) as on_progress:
        plan = _requests().plan_spec(
            spec,
            **request,
            global_batch=global_batch,
            seq_len=seq_len,
            layers=layers,
            constraints=constraints,
            recipe=recipe,
            optimizer=optimizer,
            recompute=recompute,
            compiled=not eager,
            replicate=replicate,
            time_limit_s=60.0 if time_limit is None else time_limit,
            gap=gap,
            on_progress=on_progress,
            pipeline=count_or_auto("--pipeline", pipeline),
            microbatches=count_or_auto("--microbatches", microbatches),
            schedule=schedule,
            warm=None if warm is None else Plan.load(warm),
            cache=cache,
            calibration=calibration,
        )
    if output is not None:
        plan.save(output)
    notes = [] if global_batch is not None else batch_notes(plan)
    if as_json:
        put_json(stream, {**plan_object(plan, usage), "plan": output, "notes": notes})
    else:
        ends = [*notes, *([f"written to {output}"] if output is not None else [])]
        put_text(stream, "\n\n".join([plan.summary(), *ends]))
    return 0


@app.command("check")
@click.argument("spec")
@click.option("--mesh", help="2x2 or dp=2,tp=2.  [default: the plan's]")
@click.option("--plan", "plan_path", help="Check this plan and do not solve.")
@click.option("--ranks", type=click.Choice(["simulated", "gloo"]), default="simulated", show_default=True)
@click.option("--random", type=click.IntRange(min=1, max=10**6), help="Check so many random plans and not the best.")
@click.option("--seed", type=click.IntRange(min=0, max=2**62), default=0, show_default=True)
@click.option("--pipeline", type=_SIZE, help="Cut the model into stages for so many pipeline ranks, each a --mesh.")
@click.option("--microbatches", type=_SIZE, help="Cut the batch into so many.  [default: 1]")
@click.option("--schedule", help="How the pipeline runs: 1f1b, zb-h1, interleaved:2, ...  [default: 1f1b]")
@click.option("--memory-limit", help="Bytes per device that the plan may use, e.g. 400kB.")
@click.option("--recipe", help="Check the best plan of a recipe, e.g. fsdp+tp.")
@click.option("--replicate", multiple=True, help="An op that is to run whole everywhere.")
@_model_options
@_JSON
@click.pass_obj
def check_command(
    stream: TextIO,
    spec: str,
    mesh: str | None,
    plan_path: str | None,
    ranks: str,
    random: int | None,
    seed: int,
    pipeline: int | None,
    microbatches: int | None,
    schedule: str | None,
    memory_limit: str | None,
    recipe: str | None,
    replicate: tuple[str, ...],
    global_batch: int | None,
    seq_len: int | None,
    layers: int | None,
    as_json: bool,
) -> int:
    """Compare a plan with the model itself.

    Does the sharded program compute what the model computes? Exit code 1 when it does not.
    """
    if plan_path is not None and random is not None:
        raise RequestError("'--plan' must not be given with '--random', got both; give one of them")
    if plan_path is not None and recipe is not None:
        raise RequestError("'--recipe' must not be given with '--plan', got both; give one of them")
    if plan_path is not None and (pipeline or microbatches or schedule):
        raise RequestError("'--plan' must not be given with a pipeline, got both: it has its own; give one of them")
    if schedule is not None and pipeline is None:
        raise RequestError("'--schedule' must be given with '--pipeline', got it alone; add e.g. --pipeline 2")
    plan = None if plan_path is None else Plan.load(plan_path)
    mesh = "1" if mesh is None and pipeline is not None else mesh
    if mesh is None and plan is None:
        raise RequestError("'--mesh' must be given where there is no '--plan', got neither; add e.g. --mesh 2x2")
    grid = plan.mesh if mesh is None and plan is not None else Mesh.parse(mesh or "")
    report = _requests().check_spec(
        spec,
        grid,
        plan=plan,
        ranks=ranks,
        random=random,
        seed=seed,
        pipeline=pipeline,
        microbatches=microbatches,
        schedule=schedule or "1f1b",
        memory_limit_bytes=None if memory_limit is None else parse_bytes("--memory-limit", memory_limit),
        recipe=recipe,
        replicate=replicate,
        global_batch=global_batch,
        seq_len=seq_len,
        layers=layers,
    )
    if as_json:
        put_json(stream, _report_object(report))
    else:
        put_text(stream, _report_text(report))
    return 0 if report.equal else CheckError.exit_code


def _report_object(report: Any) -> dict[str, Any]:
    differences = [
        {"name": difference.name, "kind": difference.kind, "error": _finite(difference.error)}
        for difference in report.differences
    ]
    return {
        "equal": report.equal,
        "max_error": _finite(report.max_error),
        "differences": differences,
        "ranks": report.ranks,
    }


def _finite(error: float) -> float:
    """`error` as JSON can hold it: the largest number where something is missing or of another shape."""
    return error if error <= sys.float_info.max else sys.float_info.max


def _report_text(report: Any) -> str:
    verdict = "equal" if report.equal else "NOT equal"
    lines = [f"{verdict} on {report.ranks} ranks, largest error {report.max_error:.3g}"]
    lines += [f"  {d.kind} {d.name}: error {d.error:.3g}" for d in report.differences]
    return "\n".join(lines)


@app.command("recipes")
@_JSON
@click.pass_obj
def recipes_command(stream: TextIO, as_json: bool) -> int:
    """List the named ways of splitting.

    Written for a mesh: fsdp (every axis), fsdp+tp (axis by axis), tp:tp+fsdp:dp (by axis; others are open)."""
    if as_json:
        put_json(stream, {"recipes": [{"name": name, "words": words} for name, words in RECIPES.items()]})
    else:
        width = max(map(len, RECIPES))
        put_text(stream, "\n".join(f"{name:<{width}}  {words}" for name, words in RECIPES.items()))
    return 0


@app.command("show")
@click.argument("plan_path", metavar="PLAN")
@_JSON
@click.pass_obj
def show_command(stream: TextIO, plan_path: str, as_json: bool) -> int:
    """Print a plan file.

    As tables, or with --json the plan itself."""
    plan = Plan.load(plan_path)
    put_text(stream, plan.to_bytes().decode().rstrip() if as_json else plan.summary())
    return 0


@app.command("diff")
@click.argument("first")
@click.argument("second")
@_JSON
@click.pass_obj
def diff_command(stream: TextIO, first: str, second: str, as_json: bool) -> int:
    """Print what changes between two plans."""
    diff = Plan.load(first).diff(Plan.load(second))
    if as_json:
        put_json(stream, diff_object(diff))
    else:
        put_text(stream, str(diff))
    return 0


@app.command("replay")
@click.argument("plan_path", metavar="PLAN")
@click.argument("spec")
@_model_options
@click.option("--calibration", help="Price with this file of `meshwright calibrate`.")
@click.option("--adapt", is_flag=True, help="Carry the plan over to a changed model; solve for what is new in it.")
@click.option("-o", "--output", help="Write the plan file here.")
@_JSON
@click.pass_obj
def replay_command(
    stream: TextIO,
    plan_path: str,
    spec: str,
    global_batch: int | None,
    seq_len: int | None,
    layers: int | None,
    calibration: str | None,
    adapt: bool,
    output: str | None,
    as_json: bool,
) -> int:
    """Take a plan as it is, without solving.

    Does PLAN still fit the model that SPEC gives, and what is it predicted to cost now?
    """
    usage = Usage.begin()
    plan = Plan.load(plan_path)
    size = {"global_batch": global_batch, "seq_len": seq_len, "layers": layers, "calibration": calibration}
    found = _requests().adapt_spec(plan, spec, **size) if adapt else None
    now = found.plan if found else _requests().replay_spec(plan, spec, **size)
    diff = plan.diff(now)
    if output is not None:
        now.save(output)
    if as_json:
        put_json(stream, {**plan_object(now, usage), "same": diff.same, "plan": output, "adapted": adapted(found)})
    else:
        ends = [f"written to {output}"] if output is not None else []
        put_text(stream, "\n\n".join([*([str(found)] if found else []), str(diff), *ends]))
    return 0


app.add_command(replan_command)
app.add_command(explain_command)
app.add_command(specs_command)


@app.command("doctor")
@_JSON
@click.pass_obj
def doctor_command(stream: TextIO, as_json: bool) -> int:
    """Say what this machine lacks, if anything."""
    from .doctor import examine

    findings = examine()
    fine = all(finding.ok for finding in findings)
    if as_json:
        rows = [{"name": f.name, "ok": f.ok, "found": f.found, "rule": f.rule} for f in findings]
        put_json(stream, {"ok": fine, "findings": rows})
    else:
        marks = (f"{'ok ' if f.ok else 'BAD'} {f.name:<14} {f.found}  (must be: {f.rule})" for f in findings)
        put_text(stream, "\n".join(marks))
    return 0 if fine else 2


app.add_command(validate_command)
app.add_command(run_command)
app.add_command(members_command)


def parse_bytes(option: str, text: str) -> int:
    """A number of bytes from '80GiB', '1.5GB' or '1000'."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if not 0 < size <= 2**60:
        raise RequestError(f"'{option}' must be a size such as 80GiB or 80000000000, got {text[:100]!r}")
    return size

"""`meshwright calibrate`: measure this machine, and write what plans can be priced with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec

from .cli_output import progress_line, put_json, put_text
from .plans import RequestError

__all__ = ["calibrate_command"]


@click.command("calibrate")
@click.option("-o", "--output", help="Write the calibration file here.")
@click.option("--sheet", help="The device whose data sheet fills the rest.  [default: this GPU's, or cpu]")
@click.option("--ranks", type=click.IntRange(min=1, max=4096), help="Processes at once.  [default: GPUs, or 2]")
@click.option("--threads", type=click.IntRange(min=1, max=4096), help="Of each process.  [default: cores / ranks]")
@click.option("--quick", is_flag=True, help="Fewer cases and repeats: within about a minute.")
@click.option("--no-compile", is_flag=True, help="Leave out what Inductor makes of programs.")
@click.option("--name", help="What plans call it.  [default: from sheet, ranks and threads]")
@click.option("--plot", help="Write the residuals as an SVG picture here.")
@click.option("--samples", is_flag=True, help="Print every measurement as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_obj
def calibrate_command(
    stream: TextIO,
    output: str | None,
    sheet: str | None,
    ranks: int | None,
    threads: int | None,
    quick: bool,
    no_compile: bool,
    name: str | None,
    plot: str | None,
    samples: bool,
    as_json: bool,
) -> int:
    """Measure this machine.

    Kernels, the host, optimizers, and the collectives of several processes are timed and the cost models fitted to
    them; `plan --calibration FILE` then prices with that. Leave the machine alone meanwhile.
    """
    from .planner.calibrate import calibrate, report_text, residuals_svg, write_text

    for option, path in (("--output", output), ("--plot", plot)):
        # Minutes of measuring are not to be lost at the end.
        if path is not None and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
            raise RequestError(f"'{option}' must be a file that can be written, got {path[:200]}; name another one")
    with progress_line(sys.stderr) as on_progress:
        found = calibrate(
            sheet=sheet,
            ranks=ranks,
            threads=threads,
            quick=quick,
            compiled=not no_compile,
            name=name,
            on_progress=on_progress,
        )
    if output is not None:
        found.save(output)
    if plot is not None:
        write_text(plot, residuals_svg(found))
    if as_json:
        put_json(stream, _object(found, output))
    else:
        ends = [f"\nwritten to {path}" for path in (output, plot) if path is not None]
        put_text(stream, "\n".join([report_text(found, samples=samples), *ends]))
    return 0


def _object(found: Any, output: str | None) -> dict[str, Any]:
    """What `calibrate --json` says."""
    fields = {"name": found.name, "sheet": found.sheet, "digest": found.digest(), "calibration": output}
    parts = {key: msgspec.to_builtins(getattr(found, key)) for key in ("machine", "quantities", "families")}
    return {**fields, **parts, "data_sheet": list(found.remaining())}

"""Calibrate: measure the machine that this runs on, and fit the parameters of the cost models to it.

calibration = calibrate(quick=True)
calibration.save("here.json")
plan(model, args, cluster="local", calibration=calibration)
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

import torch

from ...cost_models.calibration import Calibration, Machine
from ...cost_models.calibration_report import report_text, residuals_svg
from ...cost_models.devices import load_device
from ...cost_models.fitting import fit
from ...plans import plan_file
from ...plans.errors import RequestError
from ...plans.version import VERSION
from .workers import Job, run_job

__all__ = ["calibrate", "report_text", "residuals_svg", "write_text"]

Progress = Callable[[str, float, float], None]
_ROUNDS, _QUICK_ROUNDS = 25, 9


def calibrate(
    *,
    sheet: str | None = None,
    ranks: int | None = None,
    threads: int | None = None,
    quick: bool = False,
    compiled: bool = True,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> Calibration:
    """What this machine's kernels, links and host really take.

    sheet       the device whose data sheet fills what is not measured; by default cpu, or the GPU's by its name
    ranks       processes that talk to each other, one per device; by default as many as there are GPUs, or 2; with 1
                collectives stay as the data sheet says
    threads     threads of each process on CPUs; by default the cores divided by the ranks
    quick       fewer cases and repeats: about a minute instead of a few
    compiled    also measure what Inductor makes of programs

    On GPUs the ranks are those of one node. Raises RequestError where a request cannot be met on this machine.
    """
    device = "cuda" if torch.cuda.is_available() and sheet != "cpu" else "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = torch.cuda.device_count() if device == "cuda" else cores
    ranks = (most if device == "cuda" else min(2, cores)) if ranks is None else ranks
    if not 1 <= ranks <= most:
        raise RequestError(f"'ranks' must be 1 to {most}, the devices of this machine, got {ranks}; ask for fewer")
    threads = max(1, cores // ranks) if threads is None else threads
    if not 1 <= threads <= 4 * cores:
        raise RequestError(f"'threads' must be 1 to {4 * cores} on {cores} cores, got {threads}; leave it out")
    start = load_device(sheet or (_sheet_of_gpu() if device == "cuda" else "cpu"))

    def tell(stage: str, share: float) -> None:
        if on_progress is not None:
            on_progress(f"{stage}, {share:.0%}", 0.0, 0.0)

    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    shared = {"device": device, "threads": threads, "ranks": ranks, "quick": quick, "compiled": compiled}
    tell("start", 0.0)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    try:
        taken = run_job(Job(**shared, rounds=rounds, alone=True), tell)
        if ranks > 1:
            taken += run_job(Job(**shared, rounds=rounds, alone=False), tell)
    except RuntimeError as error:
        raise RequestError(
            f"'calibrate' must be able to run its kernels here, got {error}; try fewer ranks, or leave compiled "
            "programs out"
        ) from error
    tell("fit", 0.0)
    units = {"product.units": float(threads)} if device == "cpu" else {}
    quantities, families, samples = fit(start, taken, synchronous=device == "cpu", known=units)
    return Calibration(
        meshwright_version=VERSION,
        torch_version=str(torch.__version__),
        name=name or f"{start.name}-{ranks}x{threads}",
        sheet=start.name,
        machine=Machine(processor=_processor(device), threads=threads, ranks=ranks, load=load),
        quantities=tuple(quantities),
        families=tuple(families),
        samples=tuple(samples),
    )


def write_text(path: str, text: str) -> None:
    """Write `text` to `path`: all of it or, when anything fails, nothing."""
    plan_file.write(path, text.encode(), what="'plot'")


def _processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8")) if info.exists() else None
    words = match.group(1) if match else platform.processor() or platform.machine()
    return "".join(c for c in words if c.isprintable())[:200] or "unknown"


def _sheet_of_gpu() -> str:
    """The shipped sheet of the GPU that torch sees."""
    from ...cost_models.devices import device_names

    name = torch.cuda.get_device_name().lower()
    words = set(re.findall(r"[a-z]*\d+[a-z]*|sxm|pcie|\d+gb", name))
    fitting = [sheet for sheet in device_names() if set(sheet.split("-")) & words]
    best = max(fitting, key=lambda sheet: (len(set(sheet.split("-")) & words), "sxm" in sheet), default=None)
    if best is None:
        raise RequestError(
            f"'sheet' must be given for this GPU, got {name!r}, which no shipped sheet fits; name the nearest of "
            f"{', '.join(device_names())}"
        )
    return best

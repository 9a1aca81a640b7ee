"""Every process killed at every place of a step and of a recovery: who was out when, the next step, and the numbers.

    python -m tests.kill_matrix --until 150 --log rows.jsonl
    python -m tests.kill_matrix --table rows.jsonl

A case whose row is in the log is not run again, so the table can be made in pieces. Each case trains a model with a
batch norm and dropout in float64, split over pairs with a replica, until its last step.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import elastic_checks, elastic_runs
from .soak_elastic import reference_apart

PLACES = {
    "before the forward": "forward",
    "between forward and backward": "backward",
    "before the optimizer": "gate",
    "in the optimizer": "optimizer",
    "after the step": "after",
    "while saving": "save",
}
PHASES = ("join", "agree", "plan", "move", "build")
# By the usual rule two processes would be 1x2, without replicas.
MESHES = {"8": "4x2", "7": "7x1", "6": "3x2", "5": "5x1", "4": "2x2", "3": "3x1", "2": "2x1", "1": "1x1"}


def cases(processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and run of each case; processes are killed in one of the first steps, others in those after it."""
    base = {**elastic_checks.SHARDED, "nproc": processes, "meshes": MESHES}

    def kill(who: int, at: str, step: int = 2, **more: Any) -> dict[str, Any]:
        return {"who": who % processes, "step": step, "at": at, **more}

    for who in range(processes):
        for name, at in PLACES.items():
            saving = {"every": 2} if at == "save" else {}
            # The step in which the others wait must not be one whose smaller batch they first have to capture.
            step = {"save": 3, "optimizer": 1, "after": 1}.get(at, 2)
            yield f"{name}: {who}", {**base, **saving, "faults": [kill(who, at, step)]}
        for phase in PHASES:
            first = kill(who + 1, "backward")
            yield f"in a recovery ({phase}): {who}", {**base, "faults": [first, {"who": who, "epoch": 2, "at": phase}]}
        limits = {"hang_s": 2.5, "stall_s": 8.0}
        yield f"SIGSTOP: {who}", {**base, "limits": limits, "faults": [kill(who, "backward", how="stop")]}
        both = [kill(who, "forward"), kill(who + 1, "forward")]
        yield f"two at once: {who}", {**base, "faults": both}
        down = [kill(who + at, ("forward", "backward", "gate")[at % 3], 2 + at) for at in range(processes - 1)]
        yield f"in turn down to one: from {who}", {**base, "faults": down}
        again = {"pause_s": 0.3, "limits": {"respawn": 1}}
        yield f"comes back: {who}", {**base, **again, "faults": [kill(who, "backward")]}


def run(given: dict[str, Any], folder: Path, alone: list[float]) -> dict[str, Any]:
    """One case; what its row says."""
    options = dict(given)
    if "every" in options:
        options["checkpoint"] = str(folder / "saved")
    asked = {"folder": str(folder), "nproc": options.pop("nproc"), "limits": options.pop("limits", {})}
    before = time.monotonic()
    code = elastic_runs.run({**asked, "options": options, "watchdog_s": 90.0})
    (folder / "code.txt").write_text(f"{code} {time.monotonic() - before:.2f}", encoding="utf-8")
    found = elastic_checks.left(folder)
    wrong = ""
    try:
        elastic_checks.sound(found, alone)
    except AssertionError as error:
        wrong = str(error)[-500:] or "wrong"
    return {"wrong": wrong, **moments(found), "members": [len(one) for one in found.members()]}


def moments(found: elastic_checks.Run) -> dict[str, Any]:
    """Seconds from the supervisor's word about a loss to the last survivor's leaving, and to a step's end."""
    out, steps = [], []
    words = re.findall(r"([\d.]+) meshwright: epoch (\d+): processes [\d, ]+ train \(process", found.said)
    for text, number in words:
        told, epoch = float(text), int(number)
        left = [entry["time"] - told for entry in found.entries if entry.get("left") == epoch]
        done = [e["ended"] - told for e in found.entries if e.get("epoch") == epoch and "loss" in e]
        out += [max(left)] if left else []
        steps += [min(done)] if done else []
    return {"out_s": max(out, default=None), "step_s": max(steps, default=None), "losses": len(words)}


def table(path: Path) -> None:
    """The rows of the log, one line per place."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault((row["case"].rpartition(":")[0], row["processes"]), []).append(row)
    print("| killed | processes | cases | out, s | next step, s | equal |\n|---|--:|--:|--:|--:|--:|")
    for (name, processes), found in rows.items():
        spans = []
        for key in ("out_s", "step_s"):
            values = [row[key] for row in found if row[key] is not None]
            spans.append(f"{min(values):.2f} to {max(values):.2f}" if values else "")
        equal = sum(not row["wrong"] for row in found)
        print(f"| {name} | {processes} | {len(found)} | {spans[0]} | {spans[1]} | {equal} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", default="", help="Cases whose name matches this pattern.")
    parser.add_argument("--log", type=Path, default=Path("kill_matrix.jsonl"))
    parser.add_argument("--until", type=float, default=1e9, help="Begin no case after so many seconds.")
    parser.add_argument("--table", type=Path, help="Print the table of this log instead.")
    asked = parser.parse_args()
    if asked.table is not None:
        table(asked.table)
        return 0
    began, failed = time.monotonic(), 0
    lines = asked.log.read_text(encoding="utf-8").splitlines() if asked.log.exists() else []
    known = {(row["case"], row["processes"]) for row in map(json.loads, lines)}
    alone = reference_apart()
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    for at, (name, given) in enumerate(cases(asked.processes)):
        if (name, asked.processes) in known or not re.search(asked.only, name):
            continue
        if time.monotonic() - began > asked.until:
            break
        folder = root / str(at)
        row = {"case": name, "processes": asked.processes, **run(given, folder, alone)}
        with asked.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        if row["wrong"]:
            failed += 1
            print(folder, flush=True)
        else:
            shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random fault schedules, one after another: no hang, no wrong number.

    python -m tests.soak_elastic --schedules 100 --seed 0
    python -m tests.soak_elastic --from 24 --schedules 12 --log soak.txt

Schedule n of a seed is always the same one. Each
schedule draws processes, layouts and faults: at chosen places in steps and regroupings, and signals at moments
that nobody chose. A schedule that fails is kept, with its log, and printed as what `elastic_runs` takes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import elastic_checks, elastic_runs

PHASES = ("leave", "join", "agree", "plan", "move", "build")
PLACES = ("forward", "backward", "gate", "optimizer", "after", "save")


def schedule(draw: random.Random, folder: Path) -> dict[str, Any]:
    """One schedule: some process is always left, or comes back."""
    nproc = draw.randint(3, 6)
    layouts = [
        {"mesh": f"{nproc}", "constraints": ["*.weight = R", "*.bias = R", "gain = R", "norm.running_* = R"]},
        {"mesh": f"{nproc}", "constraints": ["*.weight = S(0)", "*.bias = S(0)", "gain = S(0)"]},
    ]
    layouts += (
        [elastic_checks.SHARDED, {**elastic_checks.REPLANNED, "mesh": f"{nproc // 2}x2"}] if nproc % 2 == 0 else []
    )
    options = {**draw.choice(layouts), "checkpoint": str(folder / "saved"), "every": draw.randint(1, 4)}
    doomed = draw.sample(range(nproc), draw.randint(1, nproc - 1))
    faults: list[dict[str, Any]] = []
    blows: list[list[float]] = []
    for who in doomed:
        kind = draw.random()
        if kind < 0.5:
            how = "stop" if draw.random() < 0.2 else "kill"
            faults.append({"who": who, "step": draw.randint(0, 11), "at": draw.choice(PLACES), "how": how})
        elif kind < 0.75:
            faults.append({"who": who, "epoch": draw.randint(1, 3), "at": draw.choice(PHASES)})
        else:
            number = signal.SIGSTOP if draw.random() < 0.2 else signal.SIGKILL
            blows.append([round(draw.uniform(0.0, 4.0), 3), who, int(number)])
    limits = {"hang_s": 8.0, "stall_s": 60.0, "respawn": draw.choice((0, 0, 1, 2))}
    options["faults"] = faults
    return {"folder": str(folder), "nproc": nproc, "limits": limits, "options": options, "blows": blows}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="first", help="The number of the first schedule.")
    parser.add_argument("--log", type=Path, help="Append one line per schedule to this file.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--watchdog", type=float, default=180.0, help="Seconds for one schedule.")
    parser.add_argument("--until", type=float, default=1e9, help="Begin no schedule after so many seconds.")
    asked = parser.parse_args()
    alone = reference_apart()
    root, began, failed, ran = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic(), 0, 0
    epochs = 0
    for index in range(asked.first, asked.first + asked.schedules):
        if time.monotonic() - began > asked.until:
            break
        folder = root / str(index)
        given = schedule(random.Random(f"{asked.seed}/{index}"), folder)
        before = time.monotonic()
        code = elastic_runs.run({**given, "watchdog_s": asked.watchdog})
        (folder / "code.txt").write_text(f"{code} {time.monotonic() - before:.2f}", encoding="utf-8")
        found = elastic_checks.left(folder)
        ran, epochs = ran + 1, epochs + len(found.members())
        try:
            elastic_checks.sound(found, alone)
        except AssertionError as error:
            failed += 1
            record(asked.log, f"{index} FAILED {folder}")
            print(f"schedule {index} FAILED: {str(error)[:2000]}\n{json.dumps(given)}\n{folder}", flush=True)
            continue
        print(f"schedule {index}: {given['nproc']} processes, {found.members()}, {found.seconds:.1f} s", flush=True)
        record(asked.log, f"{index} passed {found.seconds:.1f} s")
        shutil.rmtree(folder)
    print(f"{ran} schedules, {epochs} epochs, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def record(log: Path | None, line: str) -> None:
    """One line more in the file."""
    if log is not None:
        with log.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def reference_apart() -> list[float]:
    """The losses of one process; computed in another one, so that this one stays fit for forking."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1) as pool:
        script = elastic_checks.script
        return pool.apply(elastic_checks.reference, (script.SAMPLES, script.EPOCHS), {"plain": False})


if __name__ == "__main__":
    sys.exit(main())

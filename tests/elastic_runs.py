"""Runs of elastic_train.py under supervisors, one after another in one process that loads torch once.

    python tests/elastic_runs.py RUNS.json

RUNS.json holds a list of {"folder", "nproc", "limits", "options", "blows", "slowed"}; each run leaves log.txt,
code.txt and what the script writes in its folder. A run that takes longer than its watchdog is ended and has the code
-14.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.planner.training.processes import forked
from meshwright.planner.training.supervisor import Limits, Supervisor

SCRIPT = str(Path(__file__).with_name("elastic_train.py"))
WATCHDOG_S = 90.0


def supervise(folder: Path, asked: dict[str, Any]) -> int:
    """One run, in a process of its own."""
    stream = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(stream, descriptor)

    def say(text: str) -> None:
        os.write(2, f"{time.time():.3f} meshwright: {text}\n".encode())

    supervisor = Supervisor(
        SCRIPT,
        [str(folder), json.dumps(asked["options"])],
        nproc=asked["nproc"],
        nodes=1,
        listen="127.0.0.1:0",
        limits=Limits(**asked.get("limits", {})),
        say=say,
    )
    (folder / "address.txt").write_text(supervisor.address, encoding="utf-8")
    return supervisor.run()


def run(asked: dict[str, Any]) -> int:
    """The exit code of one run."""
    folder = Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    child = forked(lambda: supervise(folder, asked))  # it goes when this process goes
    end = time.monotonic() + asked.get("watchdog_s", WATCHDOG_S)
    blows = sorted(asked.get("blows", []))
    turn = 0
    while True:
        blows, turn = strike(folder, blows), turn + 1
        if "slowed" in asked:
            slow_down(folder, asked["slowed"], turn)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)  # and with it, by the kernel, all that it started
            os.waitpid(child, 0)
            return -signal.SIGALRM
        time.sleep(0.02)


def slow_down(folder: Path, slowed: tuple[int, float], turn: int) -> None:
    """Let a process run one turn in four, from so many seconds after the first step on."""
    who, after_s = slowed
    told, begun = folder / f"pid-{who}", folder / "begun"
    if told.exists() and begun.exists() and time.time() - begun.stat().st_mtime > after_s:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(told.read_text(encoding="utf-8")), signal.SIGCONT if turn % 4 == 0 else signal.SIGSTOP)


def strike(folder: Path, blows: list[list[float]]) -> list[list[float]]:
    """Send signals that are due, each [seconds after the first step, process, signal]; those that are left."""
    begun = folder / "begun"
    if not blows or not begun.exists():
        return blows
    since = time.time() - begun.stat().st_mtime
    for _, who, number in (blow for blow in blows if blow[0] <= since):
        told = folder / f"pid-{who:g}"
        if told.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(told.read_text(encoding="utf-8")), int(number))
    return [blow for blow in blows if blow[0] > since]


def main() -> None:
    for asked in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        began = time.monotonic()
        code = run(asked)
        (Path(asked["folder"]) / "code.txt").write_text(f"{code} {time.monotonic() - began:.2f}", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

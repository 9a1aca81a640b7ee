"""How long planning takes, from capture to plan, import included, each in a process of its own.

    python benchmarks/plan_time.py [--repeats 3] [--only 4x4x4]

Prints CPU seconds, peak memory of the planner, the proven gap and the predicted step for each cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

REQUESTS = (
    ("llama3-8b", "h100-sxm:8", "8"),
    ("llama3-8b", "h100-sxm:8x8", "8x8"),
    ("llama3-8b", "h100-sxm:16x4", "4x4x4"),
    ("llama3-8b", "h100-sxm:16x4", "2x2x4x4", "--gap", "0.01", "--time-limit", "300"),
    ("llama3-70b", "h100-sxm:8x8", "8x8"),
    ("llama3-405b", "h100-sxm:16x8", "16x8", "--time-limit", "300"),
    ("llama3-405b", "h100-sxm:16x8", "16x8", "--time-limit", "300", "--layers", "8"),
    ("deepseek-v3", "h100-sxm:32x8", "8x8x4", "--time-limit", "300"),
    ("gpt2", "h100-sxm:8", "8"),
    ("vit-l", "h100-sxm:8x8", "8x8"),
)


def planned(spec: str, cluster: str, mesh: str, *more: str) -> dict:
    """The planner's own report of one request."""
    command = [sys.executable, "-m", "meshwright", "plan", spec, "--cluster", cluster, "--mesh", mesh, "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def main() -> None:
    """Run every request and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="only requests on this mesh")
    given = parser.parse_args()
    repeats = given.repeats
    print(f"{'request':62} {'CPU s (min median max)':>24} {'memory MB':>10} {'gap':>8} {'step s':>8}  status")
    for spec, cluster, mesh, *more in REQUESTS:
        if given.only not in (None, mesh):
            continue
        runs = [planned(spec, cluster, mesh, *more) for _ in range(repeats)]
        if any("planner_cpu_s" not in run for run in runs):
            print(f"{spec} {cluster} {mesh}: {runs[0].get('error', runs[0])}")
            continue
        cpu = [run["planner_cpu_s"] for run in runs]
        memory = max(run["planner_peak_memory_bytes"] for run in runs) / 1e6
        shown = f"{min(cpu):.1f} {statistics.median(cpu):.1f} {max(cpu):.1f}"
        request = " ".join([spec, cluster, mesh, *more])
        print(
            f"{request:62} {shown:>24} {memory:10.0f} {runs[0]['gap']:8.2%} {runs[0]['step_time_s']:8.3f}  "
            f"{runs[0]['status']}"
        )


if __name__ == "__main__":
    main()

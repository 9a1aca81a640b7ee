"""Replanning against the published policies, and its own time; one line per case.

    python benchmarks/resilience.py scenarios|time|lookup [--trials 20]

scenarios: the families of ResiHP's experiments (fail-stop, fail-slow, mixed) on transformers of 16 to 256 A100s: how
much faster a step is after replanning than by each policy, geometric mean, least and most over random failures.
time: CPU seconds of one replan at 256 and 4,096 devices. lookup: milliseconds of the contingency table there.
"""

from __future__ import annotations

import argparse
import math
import random
import time

import numpy as np

from meshwright.planner.lifetime import transformer_job
from meshwright.planner.resilience import POLICIES, Job, Workbench, healthy_arrangement, replan_job
from meshwright.planner.resilience.contingency import Contingency
from meshwright.plans import Health, Infeasible

# Model, tensor, replicas, stages: ResiHP's (TP, DP, PP) run from 16 devices to (4, 4, 16).
JOBS = (("llama2-7b", 2, 2, 4), ("llama2-13b", 4, 2, 4), ("llama2-13b", 4, 4, 4), ("llama2-70b", 4, 4, 16))
FAMILIES = ("fail-stop", "fail-slow", "mixed")


def hurt(rng: random.Random, job: Job, family: str) -> Health:
    """1 to 4 % of the devices, one at least: dead, at 0.3 to 0.8 of their speed, or both."""
    count = max(1, round(job.devices * rng.uniform(0.01, 0.04)))
    speeds: dict[int, float] = {}
    for index, device in enumerate(rng.sample(range(job.devices), count + (family == "mixed"))):
        dead = family == "fail-stop" or (family == "mixed" and index % 2 == 0)
        speeds[device] = 0.0 if dead else round(rng.uniform(0.3, 0.8), 1)
    return Health.of(speeds)


def scenarios(trials: int) -> None:
    print("job                   family     policy      speed-up: mean  least   most  stops   (of", trials, "failures)")
    for model, tensor, replicas, stages in JOBS:
        job = transformer_job(model, tensor=tensor, replicas=replicas, stages=stages)
        bench = Workbench(job)
        healthy = bench.price(healthy_arrangement(job), Health(), usual=True)
        best = replan_job(job, {}, bench=bench).step_s
        print(
            f"{model}:{tensor}x{replicas}x{stages}: the healthy job divided anew is {healthy / best:.3f} times as fast"
        )
        for family in FAMILIES:
            rng = random.Random(f"{model}{tensor}{replicas}{stages}{family}")
            gains: dict[str, list[float]] = {name: [] for name in POLICIES}
            stops = dict.fromkeys(POLICIES, 0)
            kept: list[float] = []
            for _ in range(trials):
                health = hurt(rng, job, family)
                try:
                    found = replan_job(job, health, bench=bench)
                except Infeasible:
                    continue
                kept.append(healthy / found.step_s)
                for name, policy in POLICIES.items():
                    made = policy(bench, health)
                    seconds = math.inf if made is None else bench.price(made, health, usual=True)
                    if math.isinf(seconds):
                        stops[name] += 1
                    else:
                        gains[name].append(seconds / found.step_s)
            print(f"  {family}: ours keeps {np.mean(kept):.3f} of the healthy job's speed")
            for name, values in gains.items():
                if values:
                    mean = math.exp(float(np.mean(np.log(values))))
                    print(f"  {'':<20}{family:<10} {name:<10} {mean:>13.2f}  {min(values):>6.2f} {max(values):>6.2f}"
                          f"  {stops[name]:>5}", flush=True)  # fmt: skip


def timed() -> None:
    replan_job(transformer_job("llama2-7b", tensor=2, replicas=2, stages=2), {0: 0.0})
    for model, tensor, replicas, stages in (
        ("llama2-70b", 4, 4, 16),
        ("llama2-70b", 8, 8, 4),
        ("llama3-405b", 8, 32, 16),
    ):
        job = transformer_job(model, tensor=tensor, replicas=replicas, stages=stages)
        spent = []
        for seed, family in enumerate(FAMILIES * 2):
            health = (
                hurt(random.Random(seed), job, family) if seed >= 3 else Health.of({seed * 9: 0.0 if seed else 0.6})
            )
            begin = time.process_time()
            replan_job(job, health, horizon_s=3600.0)
            spent.append(time.process_time() - begin)
        few, many = (", ".join(f"{seconds:.2f}" for seconds in part) for part in (spent[:3], spent[3:]))
        name = f"{model}:{tensor}x{replicas}x{stages}, {job.devices} devices"
        print(f"{name}: one device {few} s; 1 to 4 % of them {many} s", flush=True)


def lookup() -> None:
    for replicas, stages in ((8, 4), (32, 16)):
        job = transformer_job("llama2-70b", tensor=8, replicas=replicas, stages=stages)
        begin = time.process_time()
        table = Contingency(job=job, bench=Workbench(job))
        for device in (0, 8, 16):
            table.add(Health.of({device: 0.0}))
        made = time.process_time() - begin
        spent = []
        for device in range(0, job.devices, job.devices // 16):
            begin = time.process_time()
            table.find({device: 0.0})
            spent.append(time.process_time() - begin)
        said = f"{len(table.table)} entries in {made:.1f} s, a lookup {1e3 * max(spent):.2f} ms at most"
        print(f"{job.devices} devices: {said}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scenarios", "time", "lookup"])
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    if options.what == "scenarios":
        scenarios(options.trials)
    else:
        {"time": timed, "lookup": lookup}[options.what]()

"""The detector on packed synthetic workloads and on two published job traces; one line per case.

    python benchmarks/detector.py healthy|slow|start|bare|traces|cost [--steps 1000] [--trials 100]

healthy: false alarms per 1,000 healthy steps, ours, the fixed 25 % rule, and two detectors of raw step times.
slow: how often and how soon a stage that becomes 1.15 and 1.3 times as slow is found, and the right rank named.
start: the same when it is slow from the first step on. bare: slow, from step times and
workloads alone, without the ranks' action times once the fit has settled, which no rank can be named from.
Every job has 4 stages, 2 replicas, 8 micro-batches under 1F1B, chunk noise 1.2 %, step noise 1 %, and coefficients of
the cost model that are wrong by 5 % (standard deviation).
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np

from meshwright.cost_models.pipeline import CriticalPath
from meshwright.planner.detector import DISTRIBUTIONS, Detector, JobRun
from meshwright.planner.zoo import one_f_one_b

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
TOKENS = (8192, 16384, 32768, 65536, 131072)
REPLICAS, STAGES, MICROBATCHES, WARM = 2, 4, 8, 30


def started(distribution: str, tokens: int, seed: int, mode: str = "own") -> tuple[JobRun, Detector]:
    """A job and a detector for it whose prior is wrong by 5 %."""
    path = CriticalPath.of(one_f_one_b(STAGES, MICROBATCHES))
    job = JobRun(path, REPLICAS, tokens=tokens, distribution=distribution, seed=seed)
    off = np.exp(0.05 * np.random.default_rng(seed + 1_000_000).standard_normal(job.coefficients.shape))
    given = {"prior": job.coefficients * off, "constant_s": job.constant_s}
    return job, Detector(path, REPLICAS, mode=mode, **given)  # type: ignore[arg-type]


def raw_alarms(step_s: list[float]) -> tuple[int, int]:
    """Alarms of step times alone: above 1.1 times the median of the last 10; means of 3 against 10 apart by 10 %."""
    median = sum(step_s[i] > 1.1 * float(np.median(step_s[i - 10 : i])) for i in range(10, len(step_s)))
    means = sum(np.mean(step_s[i - 3 : i]) > 1.1 * np.mean(step_s[i - 13 : i - 3]) for i in range(13, len(step_s)))
    return int(median), int(means)


def healthy(steps: int) -> None:
    print("lengths   tokens  step cv  MTP %  ITP %  alarms: own  paper  raw median  raw means  (of", steps, "steps)")
    for distribution in DISTRIBUTIONS:
        for tokens in TOKENS:
            job, own = started(distribution, tokens, 1)
            paper = started(distribution, tokens, 1, "paper")[1]
            alarms, both, errors, parts, seen = 0, 0, [], [], []
            for step in range(steps):
                work, times, step_s = job.step()
                expected = own.predictor.times(work)
                report = own.observe(step, step_s, work=work, actions_s=times)
                alarms += len(report.alarms)
                both += len(paper.observe(step, step_s, work=work, actions_s=times).alarms)
                seen.append(step_s)
                if step >= 20:
                    errors.append(abs(report.ratio - 1))
                    parts.append(np.abs(expected / times - 1).mean())
            raw = raw_alarms(seen)
            print(
                f"{distribution:<9} {tokens:>6}  {np.std(seen) / np.mean(seen):>7.3f}  {100 * np.mean(parts):>5.2f}"
                f"  {100 * np.mean(errors):>5.2f}  {alarms:>11}  {both:>5}  {raw[0]:>10}  {raw[1]:>9}",
                flush=True,
            )


def slow(trials: int, start: bool, bare: bool) -> None:
    print("lengths   tokens  factor  within  found  named  false  steps until found (mean)")
    for distribution in DISTRIBUTIONS:
        for tokens in TOKENS:
            for factor, within in ((1.15, 10), (1.3, 5)):
                print(f"{distribution:<9} {tokens:>6}  {factor:>6}  {within:>6}  "
                      + trial(distribution, tokens, factor, within, trials, start, bare), flush=True)  # fmt: skip


def trial(distribution: str, tokens: int, factor: float, within: int, trials: int, start: bool, bare: bool) -> str:
    found = named = false = 0
    after: list[int] = []
    for index in range(trials):
        where = (index % REPLICAS, index // REPLICAS % STAGES)
        if start or index % 10 == 0:
            job, warm = started(distribution, tokens, 1000 + index)
            begin = 0 if start else WARM
            false += sum(len(observed(job, warm, step, {})) for step in range(begin))
        detector = copy.deepcopy(warm)
        for step in range(begin, begin + within):
            alarms = observed(job, detector, step, {where: factor}, bare)
            if alarms:
                found += 1
                named += (alarms[0].replica, alarms[0].stage) == where
                after.append(step - begin + 1)
                break
    mean = f"{np.mean(after):.2f}" if after else "-"
    return f"{found / trials:>5.2f}  {named / trials:>5.2f}  {false:>5}  {mean}"


def observed(
    job: JobRun, detector: Detector, step: int, slowed: dict[tuple[int, int], float], bare: bool = False
) -> tuple:
    work, times, step_s = job.step(slowed)
    return detector.observe(step, step_s, work=work, actions_s=None if bare else times).alarms


def traces() -> None:
    for name in ("st", "se"):
        data = np.load(DATA / f"straggler_{name}.npz")
        times, step_s = data["ticks"] * 2e-5, data["step_s"].astype(float)
        path = CriticalPath.of(one_f_one_b(times.shape[3], times.shape[4]))
        lengths = np.array([path.lengths(one).max() for one in times])
        constant = float(np.median(step_s - lengths))
        error = np.abs((lengths + constant) / step_s - 1).mean()
        detector, alarms, online = Detector(path, times.shape[1]), 0, []
        for step, (one, seconds) in enumerate(zip(times, step_s, strict=True)):
            report = detector.observe(step, float(seconds), actions_s=one)
            alarms += len(report.alarms)
            online.append(abs(report.ratio - 1))
        print(f"{name}: critical path alone {100 * np.abs(lengths / step_s - 1).mean():.2f} %, with one constant of"
              f" {constant:.3f} s {100 * error:.2f} %, online {100 * np.mean(online):.2f} %; alarms {alarms}, raw"
              f" {raw_alarms(step_s.tolist())}")  # fmt: skip


def cost() -> None:
    """CPU time of one observation against the step it watches."""
    for replicas, stages, microbatches in ((2, 4, 8), (16, 16, 32), (32, 16, 64)):
        path = CriticalPath.of(one_f_one_b(stages, microbatches))
        job = JobRun(path, replicas, tokens=8192, distribution="chat")
        detector = Detector(path, replicas, prior=job.coefficients, constant_s=job.constant_s)
        steps = [job.step() for _ in range(6)]
        spent = []
        for step, (work, times, step_s) in enumerate(steps):
            begin = time.process_time()
            detector.observe(step, step_s, work=work, actions_s=times)
            spent.append(time.process_time() - begin)
        share = float(np.median(spent)) / steps[0][2]
        print(f"{replicas} replicas, {stages} stages, {microbatches} micro-batches: {1e3 * np.median(spent):.2f} ms"
              f" of a step of {steps[0][2]:.1f} s, {100 * share:.4f} %")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["healthy", "slow", "start", "bare", "traces", "cost"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=100)
    options = parser.parse_args()
    if options.what == "healthy":
        healthy(options.steps)
    elif options.what in ("slow", "start", "bare"):
        slow(options.trials, options.what == "start", options.what == "bare")
    else:
        {"traces": traces, "cost": cost}[options.what]()

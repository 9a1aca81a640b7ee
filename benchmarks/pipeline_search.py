"""Pipelines: the search against its bound and against the published schedules on equal layers, one line per case.

    python benchmarks/pipeline_search.py PROFILES.json[:NAME] --layers 32 --pp 4 --microbatches 8 --memory 1f1b
    --seconds 10

PROFILES.json as `meshwright simulate --profile` takes it. CPU seconds of this process, imports not counted.
"""

from __future__ import annotations

import argparse

from meshwright.cost_models.pipeline import simulate
from meshwright.planner.pipeline import Clock, LayerProfile, equal_cuts, load_profile, tune_profile
from meshwright.planner.zoo import chunks_of, named_schedule
from meshwright.plans import RequestError

ZOO = ("gpipe", "1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")


def published(profile: LayerProfile, ranks: int, microbatches: int) -> dict[str, tuple[float, float]]:
    """Makespan and largest memory of each published schedule that is defined here, on equal layers."""
    found = {}
    for name in ZOO:
        try:
            costs = profile.stage_costs(equal_cuts(profile, ranks * chunks_of(name)))
            parts = (costs.forward, costs.input_gradient, costs.weight_gradient)
            forward, inputs, weights = (sum(part) / costs.stages for part in parts)
            schedule = named_schedule(name, ranks, microbatches, costs=(forward, inputs, weights), delay=profile.delay)
        except RequestError:
            continue
        simulation = simulate(schedule, costs)
        found[name] = (simulation.makespan, max(simulation.peak_memory))
    return found


def main() -> None:
    """Run one case and print its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--pattern")
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--memory", choices=["1f1b", "none"], default="none")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    profile = load_profile(given.profile, layers=given.layers, pattern=given.pattern)
    ranks, microbatches = given.pp, given.microbatches
    limit = profile.one_f_one_b_memory(ranks, microbatches)
    limits = [limit] * ranks if given.memory == "1f1b" else None
    found = tune_profile(profile, ranks, microbatches, limits=limits, clock=Clock(limit_s=given.seconds))
    zoo = published(profile, ranks, microbatches)
    interleaved = min((time for name, (time, _) in zoo.items() if name.startswith("interleaved")), default=None)
    fitting = min(time for time, memory in zoo.values() if limits is None or memory <= limit)
    reached = found.simulation.makespan
    cells = [
        given.profile.rpartition(":")[2],
        str(sum(profile.layers)),
        str(ranks),
        str(microbatches),
        given.memory,
        f"{reached:.6g}",
        f"{found.lower_bound:.6g}",
        f"{found.gap:.2%}",
        f"{fitting:.6g}",
        "-" if interleaved is None else f"{interleaved / reached:.3f}",
        f"{found.search_cpu_s:.1f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Partition, placement and schedule of a layer profile, searched together and anytime."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...cost_models.pipeline import simulate
from ...cost_models.pipeline.arrays import Arrays, orders_of, schedule_of
from ...plans import Infeasible, RequestError, Schedule
from ..zoo import chunks_of, named_schedule
from .fixed import split
from .listing import Listed, ListScratch
from .orders import Clock, Orders
from .plans import Plan, Search, anneal_plans, refresh, settle
from .polish import Polisher
from .profile_bounds import bound_and_shares
from .profiles import LayerProfile, equal_cuts
from .result import Tuned
from .starts import Shares, starts

__all__ = ["tune_profile"]

_ZOO = ("1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
# Shares of the time: rules of all drafts; of the rest, orders of their own instead of plans, more where moves are
# cheap, and the actions for which they get half of that more. Under a memory limit lists do worse and orders get more.
_SAMPLED, _POLISHED, _POLISH_MORE, _POLISH_ACTIONS = 0.1, 0.1, (0.1, 0.4), (500, 1500)
# Rounds: how many drafts go on (0: as many as the time allows), share of the time, temperatures of plans, as a share of
# the bound, and of orders, as a share of the step time. Under a memory limit rules alone do not tell drafts apart.
_ROUNDS = ((8, 0.4, 0.004, 0.006), (3, 0.25, 0.003, 0.008), (1, 0.15, 0.0015, 0.006), (1, 0.1, 0.0015, 0.003))
_ROUNDS_LIMITED = ((0, 0.3, 0.004, 0.006), (8, 0.2, 0.003, 0.006), (3, 0.2, 0.003, 0.006), (1, 0.2, 0.0015, 0.003))
# Moves that a draft needs, and what one takes per action.
_FIRST_MOVES, _MOVE_S, _FEWEST_DRAFTS, _KEPT = 300, 5e-8, 6, 24
_MEAN_WEIGHT, _STAGE_SHARE = 0.2, 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """What the search is given, once as arrays."""

    profile: LayerProfile
    ranks: int
    microbatches: int
    overhead: float
    prefix: np.ndarray
    delays: np.ndarray
    limits: np.ndarray
    bound: float
    shares: Shares | None
    seed: int

    @property
    def limited(self) -> bool:
        """Whether every rank has a memory limit."""
        return bool(np.isfinite(self.limits).all())

    def arrays(self, cuts: Sequence[int], placement: Sequence[int]) -> Arrays:
        """Costs of the stages that `cuts` make on the ranks of `placement`."""
        costs = self.profile.stage_costs([int(cut) for cut in cuts], overhead=self.overhead)
        return Arrays.of(costs, [int(rank) for rank in placement], self.ranks, self.microbatches, self.limits.tolist())


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A plan, the rule of its first list, its step time, and the space for plans of so many stages."""

    plan: Plan
    rule: np.ndarray
    space: Search
    step: float = math.inf
    orders: Orders | None = None
    polished: Orders | None = None

    @property
    def value(self) -> float:
        """The step time of the best orders."""
        return self.step if self.polished is None else min(self.step, self.polished.step)

    def polish(self, polisher: Polisher, seconds: float, *, heat: float, seed: int) -> None:
        """Improve the best orders, those of an earlier polish or of a later list."""
        known = [orders for orders in (self.orders, self.polished) if orders is not None]
        if known:
            start = min(known, key=lambda orders: orders.value)
            self.polished = polisher.better(start, seconds, heat=heat, seed=seed)


def tune_profile(
    profile: LayerProfile,
    ranks: int,
    microbatches: int,
    *,
    limits: Sequence[float] | None = None,
    overhead: float = 0.0,
    clock: Clock,
    seed: int = 0,
) -> Tuned:
    """The best plan found in the time of `clock`: at least as good as every published schedule that fits.

    Infeasible if there are fewer units than ranks, or if the ranks together cannot hold one micro-batch.
    """
    _check(profile, ranks, limits)
    given = [math.inf] * ranks if limits is None else list(limits)
    step = _step(profile)
    exact = _multiples(profile, step)
    seconds = max(0.3, 0.08 * clock.limit_s)
    bound, shares = bound_and_shares(profile, ranks, microbatches, limits=limits, seconds=seconds)
    problem = _Problem(
        profile=exact,
        ranks=ranks,
        microbatches=microbatches,
        overhead=round(overhead / step) * step,
        prefix=_prefix(exact),
        delays=np.full(profile.units, exact.delay),
        limits=np.array(given) + 1e-9,
        bound=bound,
        shares=shares,
        seed=seed,
    )
    best, progress = _search(problem, clock)
    schedule = schedule_of(best.word, best.first, best.arrays.place.tolist(), microbatches)
    cuts = tuple(int(cut) for cut in best.cuts)
    costs = profile.stage_costs(cuts, overhead=overhead)
    return Tuned(
        schedule=schedule,
        costs=costs,
        simulation=simulate(schedule, costs),
        lower_bound=problem.bound,
        limits=None if limits is None else tuple(limits),
        cuts=cuts,
        progress=tuple(progress),
        search_cpu_s=clock.spent_s,
    )


def _check(profile: LayerProfile, ranks: int, limits: Sequence[float] | None) -> None:
    if profile.units < ranks:
        raise Infeasible(
            f"'pp' must be at most the {profile.units} layers, embedding and head, got {ranks}; use fewer ranks"
        )
    held = math.fsum(profile.memory)
    if limits is not None and held > sum(limits) + 1e-9:
        raise Infeasible(
            f"'memory' must hold one micro-batch on all ranks together, got {sum(limits):g} where {held:g} are needed,"
            f" {held - sum(limits):g} more; raise it or use more ranks"
        )


def _prefix(profile: LayerProfile) -> np.ndarray:
    """Sums of F, I, W and memory before each unit, 4 x (units + 1)."""
    rows = np.array([[*cost, held] for cost, held in zip(profile.costs, profile.memory, strict=True)])
    return np.concatenate([np.zeros((1, 4)), np.cumsum(rows, axis=0)]).T.copy()


def _step(profile: LayerProfile) -> float:
    """A power of two of which sums of times of the whole search are exact: what ends together then compares as equal,
    in whichever order it was added.
    """
    total = math.fsum(map(sum, profile.costs)) + profile.delay
    return 2.0 ** (math.ceil(math.log2(total)) - 40) if total > 0 else 1.0


def _multiples(profile: LayerProfile, step: float) -> LayerProfile:
    """The profile with its times rounded to multiples of `step`."""
    costs = tuple((round(f / step) * step, round(i / step) * step, round(w / step) * step) for f, i, w in profile.costs)
    return replace(profile, costs=costs, delay=round(profile.delay / step) * step)


class _Best:
    """The best solution so far and when it was found."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.orders: Orders | None = None
        self.progress: list[tuple[float, float]] = []

    def take(self, found: Orders | None) -> None:
        if found is None or (self.orders is not None and found.value >= self.orders.value):
            return
        if self.orders is None or found.step < self.orders.step:
            self.progress.append((self.clock.spent_s, found.step))
        self.orders = found

    @property
    def step(self) -> float:
        return math.inf if self.orders is None else self.orders.step


def _search(problem: _Problem, clock: Clock) -> tuple[Orders, list[tuple[float, float]]]:
    best = _Best(clock)
    for orders in _published(problem):
        best.take(orders)
    target = problem.bound * (1 + 1e-9)
    polisher = Polisher(prefix=problem.prefix, overhead=problem.overhead, target=target, clock=clock)
    budget = max(0.0, clock.left_s)
    pool = _sampled(problem, clock, clock.left_s - _SAMPLED * budget, best)
    polished = _polish_share(problem)
    for round_, (keep, part, heat, polish_heat) in enumerate(_ROUNDS_LIMITED if problem.limited else _ROUNDS):
        pool = _distinct(pool)[: keep or _first_round(problem, part * budget)]
        until = clock.left_s - part * budget
        for index, draft in enumerate(list(pool)):
            seconds = (clock.left_s - until) / (len(pool) - index)
            if best.step <= target or seconds <= 0:
                break
            grown = _annealed(problem, draft, heat, (1 - polished) * seconds, clock, seed=97 * round_ + index)
            best.take(grown.orders)
            grown.polish(polisher, polished * seconds, heat=polish_heat, seed=problem.seed + 31 * round_ + index)
            best.take(grown.polished)
            pool[index] = grown
    if best.orders is None:
        raise Infeasible(
            "'memory' must let some partition keep one micro-batch of each rank, got none that does; raise it"
        )
    return best.orders, best.progress


def _polish_share(problem: _Problem) -> float:
    """Which share of the time goes to orders of their own."""
    actions = 6 * problem.ranks * problem.microbatches
    more, few = _POLISH_MORE[problem.limited], _POLISH_ACTIONS[problem.limited]
    return _POLISHED + more * few / (few + actions)


def _first_round(problem: _Problem, seconds: float) -> int:
    """How many drafts can have moves enough to be told apart in so many seconds."""
    each = _FIRST_MOVES * _MOVE_S * 3 * problem.profile.units * problem.microbatches
    return max(_FEWEST_DRAFTS, int(seconds / each))


def _distinct(pool: list[_Draft]) -> list[_Draft]:
    """The drafts, the best first, of those with the same placement the best."""
    chosen: dict[tuple[int, ...], _Draft] = {}
    for draft in sorted(pool, key=lambda draft: draft.value):
        chosen.setdefault(tuple(draft.plan.place.tolist()), draft)
    return list(chosen.values())


def _sampled(problem: _Problem, clock: Clock, until: float, best: _Best) -> list[_Draft]:
    """Drafts with the best of random rules; those that fall behind are given up, half of them at a time."""
    pool = list(_drafts(problem))
    generator = np.random.default_rng(problem.seed)
    rounds = max(1, math.ceil(math.log2(len(pool))))
    seconds = (clock.left_s - until) / rounds
    for round_ in range(rounds):
        end = clock.left_s - seconds
        turn = 0
        while clock.left_s > end or turn < (len(pool) if round_ == 0 else 0):
            _try_rule(problem, pool[turn % len(pool)], generator)
            turn += 1
            if clock.left_s <= until and turn >= 1 and best.orders is not None:
                break
        pool = sorted(pool, key=lambda draft: draft.step)
        for draft in pool[:2]:
            best.take(draft.orders)
        if best.step <= problem.bound * (1 + 1e-9):
            break
        pool = pool[: max(_KEPT, (len(pool) + 1) // 2)]
    return pool


def _try_rule(problem: _Problem, draft: _Draft, generator: np.random.Generator) -> None:
    """List the draft by a random rule and keep it if it is its best."""
    ranks, stages = problem.ranks, len(draft.plan.place)
    slope, rise, bias = generator.normal(0.0, ranks, 3) * (generator.random(3) < (0.5, 0.5, 1.0))
    depth = np.arange(stages) / stages
    urgency = np.concatenate([slope * depth, bias - ranks / 2 + rise * depth])
    turns = (0.0, 2.0 * ranks * generator.random(), 1e6)[generator.integers(3)]
    press = generator.normal(0.0, 2.0 * ranks) if problem.limited and generator.random() < 0.5 else 0.0
    rule = np.array([1.2 * generator.random(), turns, press, 0.5 * generator.integers(3)])
    key = urgency[:, None] + np.arange(problem.microbatches)[None, :]
    refresh(draft.plan, draft.space, rule[3])
    most = _held(problem, draft.plan, generator)
    step = settle(draft.space, key, most, rule, 2, draft.step)
    if step < draft.step:
        draft.step = step
        draft.plan.key[:] = draft.space.scratch.ends - draft.space.forth.duration[: 2 * stages, None]
        draft.plan.most[:] = most
        draft.rule[[0, 3]] = rule[[0, 3]]
        draft.orders = draft.space.scratch.orders(_arrays_of(problem, draft.plan), draft.plan.cuts)


def _held(problem: _Problem, plan: Plan, generator: np.random.Generator) -> np.ndarray:
    """How many micro-batches each stage may hold: all, or as many as its time from F to I asks for, the ranks' memory
    shared out by it.
    """
    stages = len(plan.place)
    if not problem.limited or generator.random() < 0.5:
        return np.full(stages, problem.microbatches)
    pieces = np.concatenate([[0], plan.cuts, [problem.profile.units]])
    sums = problem.prefix[:, pieces[1:]] - problem.prefix[:, pieces[:-1]]
    life = np.cumsum((sums[0] + sums[1])[::-1])[::-1]
    needs = np.bincount(plan.place, life * sums[3], minlength=problem.ranks)
    share = (problem.limits / np.maximum(needs, 1e-300))[plan.place]
    wide = generator.uniform(0.7, 1.6)
    return np.clip(np.ceil(wide * share * life), 1, problem.microbatches).astype(np.int64)


def _arrays_of(problem: _Problem, plan: Plan) -> Arrays:
    return problem.arrays(plan.cuts.tolist(), plan.place.tolist())


def _published(problem: _Problem) -> Iterator[Orders]:
    """The published schedules on equal layers, as far as they are defined and fit."""
    profile, ranks = problem.profile, problem.ranks
    for name in _ZOO:
        try:
            cuts = equal_cuts(profile, ranks * chunks_of(name))
            costs = profile.stage_costs(cuts)
            parts = (costs.forward, costs.input_gradient, costs.weight_gradient)
            forward, inputs, weights = (sum(part) / costs.stages for part in parts)
            schedule = named_schedule(
                name, ranks, problem.microbatches, costs=(forward, inputs, weights), delay=profile.delay
            )
        except RequestError:
            continue
        yield from _as_orders(problem, schedule, cuts)


def _as_orders(problem: _Problem, schedule: Schedule, cuts: Sequence[int]) -> Iterator[Orders]:
    arrays = problem.arrays(cuts, schedule.placement)
    for variant in (schedule, split(schedule)):
        found = Orders.of(arrays, *orders_of(variant), cuts)
        if found is not None:
            yield found


def _drafts(problem: _Problem) -> Iterator[_Draft]:
    spaces: dict[int, Search] = {}
    for cuts, placement in starts(problem.prefix, problem.ranks, problem.microbatches, problem.shares):
        stages = len(placement)
        if stages not in spaces:
            spaces[stages] = _space(problem, stages)
        key = np.zeros((2 * stages, problem.microbatches))
        most = np.full(stages, problem.microbatches)
        plan = Plan(cuts.copy(), np.array(placement, np.int64), key, most)
        yield _Draft(plan=plan, rule=np.array([0.5, 0.0, 0.0, 1.0]), space=spaces[stages])


def _space(problem: _Problem, stages: int) -> Search:
    ranks, microbatches = problem.ranks, problem.microbatches

    def blank() -> Listed:
        return Listed(
            np.zeros(stages, np.int64),
            np.zeros(4 * stages),
            np.zeros(4 * stages),
            np.zeros(stages),
            np.zeros(stages),
            problem.limits,
            np.zeros(ranks),
        )

    return Search(
        problem.prefix,
        problem.overhead,
        problem.delays,
        blank(),
        blank(),
        ListScratch.make(ranks, stages, microbatches),
        np.zeros(ranks),
        np.zeros((2 * stages, microbatches)),
        np.array([1], np.int64),
    )


def _annealed(problem: _Problem, draft: _Draft, heat: float, seconds: float, clock: Clock, *, seed: int) -> _Draft:
    """The best of an annealing run of about so many seconds from `draft`."""
    until = clock.spent_s + seconds
    space = draft.space
    rows, lengths = space.scratch.rows.copy(), space.scratch.lengths.copy()
    # A short run says how long a move takes, and may find something itself.
    found, moves = replace(draft), 30
    for pass_ in range(2):
        begin = clock.spent_s
        best = draft.plan.copy()
        space.state[0] = _state(problem.seed, seed, pass_)
        step = anneal_plans(
            draft.plan.copy(),
            space,
            draft.rule,
            moves,
            heat * problem.bound,
            0.05 * heat * problem.bound,
            _MEAN_WEIGHT,
            _STAGE_SHARE,
            best,
            rows,
            lengths,
            draft.plan.copy(),
        )
        if step < found.step:
            found = replace(found, plan=best, step=step)
            found.orders = space.scratch._replace(rows=rows, lengths=lengths).orders(
                _arrays_of(problem, best), best.cuts
            )
        each = max(clock.spent_s - begin, 1e-6) / moves
        moves = int((until - clock.spent_s) / each)
        if moves < 20:
            break
    return found


def _state(*seeds: int) -> int:
    """A start of the random numbers, not zero and below 2 ** 62."""
    value = 88172645463325252
    for seed in seeds:
        value = (value * 6364136223846793005 + seed * 1442695040888963407 + 1) % (1 << 62)
    return value | 1

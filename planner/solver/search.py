"""The plan of least seconds: shrink, bound by prices, drop what cannot win, and leave the rest to a 0/1 program."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...plans.errors import Infeasible
from .bounds import Ascent, Pricing, ascend, by_messages, by_tables, match, tables_at
from .descent import Descent
from .elimination import Totals, is_exact, order, totals, work
from .messages import Messages
from .problem import Problem, Row, Solution, Stats, evaluate, within_rows
from .program import build, run
from .reductions import Lift, absorb, clean, complete, consistent, fold, restrict
from .verdict import blame
from .ways import Way

__all__ = ["Progress", "solve"]

Progress = Callable[[str, float, float], None]

# Entries of a table, and of all tables of one pass: where there are more, messages bound the plan instead.
_TABLE = 1e8
_QUICK = 6e7
# Choices per node in a first look where pairs are not written out.
_FEW = 24
# Most columns that a 0/1 program may have.
_COLUMNS = 400_000
# Pairs in the first exact program, when many more could still win.
_KERNEL = 6_000
# Plans of another search that are made to keep new rows, and plans that a search hands on.
_REPAIRED, _OTHERS = 3, 20
# Relative distance to the best plan at which a choice is taken as unable to win.
_TIE = 1e-9


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-4,
    solver: str = "highs",
    on_progress: Progress | None = None,
    warm: Sequence[Sequence[int]] = (),
    bound: float = -math.inf,
    prices: Mapping[str, float] | None = None,
) -> Solution:
    """The best plan, with a proven bound; Infeasible says which limit binds and by how much.

    A search that is like another starts from what that one found: plans (`warm`), a bound that holds here too (as that
    of the same problem with fewer rows does), and `prices` of rows.
    """
    if solver not in ("highs", "cbc"):
        raise ValueError(f"'solver' must be 'highs' or 'cbc', got {solver!r}")
    began = time.perf_counter()
    search = _Search(
        original=problem,
        problem=complete(problem),
        deadline=began + time_limit_s,
        gap=gap,
        solver=solver,
        bound=bound,
        prices=dict(prices or {}),
        report=on_progress or (lambda stage, objective, bound: None),
    )
    interrupted = False
    try:
        search.start([tuple(plan) for plan in warm])
        search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        interrupted = True
    except _Closed:
        pass
    return search.solution(time.perf_counter() - began, interrupted)


class _Closed(Exception):  # noqa: N818
    """The gap is closed: nothing is left to do."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """What is left of the problem, the best plan of the original, and the bound proven for it."""

    original: Problem
    problem: Problem
    deadline: float
    gap: float
    solver: str
    report: Progress
    bound: float
    prices: dict[str, float]
    lifts: list[Lift] = field(default_factory=list)
    best: tuple[int, ...] | None = None
    upper: float = math.inf
    floor: float = math.inf
    seen: dict[tuple[int, ...], float] = field(default_factory=dict)
    met: dict[tuple[int, ...], float] = field(default_factory=dict)
    sweeps: int = 0
    programs: int = 0
    columns: int = 0
    kept: int = 0

    def run(self) -> None:
        """All stages; ends early by _Closed."""
        self.tidy()
        self.kept = sum(self.problem.sizes)
        for _ in range(6):
            before = sum(self.problem.sizes)
            if before == len(self.problem.sizes) or self.late():
                break
            self.price()
            if sum(self.problem.sizes) > 0.8 * before:
                break
        self.finish()

    def start(self, plans: Sequence[tuple[int, ...]]) -> None:
        """Take plans of another search; those that do not keep the rows are made to."""
        values = [self.consider(plan) for plan in plans]
        self.settle("warm")
        for plan, taken in zip(plans[:_REPAIRED], values, strict=False):
            value = evaluate(self.original, plan)
            if math.isfinite(value) and not math.isfinite(taken) and not _open(self.problem):
                fixed = Descent.of(self.problem).repair(plan, _fines(self.problem, value))
                if fixed is not None:
                    self.consider(fixed)
        self.settle("warm")

    def tidy(self) -> None:
        """Shrink; where passes over tables would be slow, without comparing choices, which would be slow too."""
        if not _open(self.problem) and _effort(self.problem) <= _QUICK:
            self.shrink()
            return
        self.problem, lift = restrict(self.problem, consistent(self.problem))
        self.lifts.append(lift)
        self.problem, absorbed = absorb(fold(self.problem))
        self.lifts += [] if absorbed is None else [absorbed]
        self.seen.clear()

    def shrink(self) -> None:
        """Clean and absorb; a plan of what is left maps back through the lifts."""
        self.problem, lifts = _shrunk(self.problem)
        self.lifts += lifts
        self.seen.clear()
        if max(self.problem.sizes, default=1) == 1:
            self.offer((0,) * len(self.problem.nodes))

    def blame(self) -> None:
        """Say why nothing fits, or learn of a plan that does."""
        plan = blame(self.problem, {row.name: row.limit for row in self.original.rows}, self.solver, self.deadline)
        if plan is not None:
            self.offer(plan)

    def price(self) -> None:
        """Raise the bound by prices, find plans on the way, drop what cannot beat the best."""
        pricing = Pricing.of(self.problem)
        names = [*(row.name for row in self.problem.rows), *(f"overlap {k}" for k in range(len(self.problem.overlaps)))]
        ascent = Ascent(prices=np.array([self.prices.get(name, 0.0) for name in names]) * pricing.units)
        rounds = 16 + 6 * len(pricing.terms)
        if _open(self.problem) or _effort(self.problem) > _QUICK:
            least = self.tell(pricing, ascent, rounds)
        else:
            least = self.climb(pricing, ascent, rounds)
        self.prices |= dict(zip(names, (ascent.prices / pricing.units).tolist(), strict=True))
        self.settle("prices")
        if _open(self.problem):
            found = least()
            self.search(ascent, self.near(ascent.plans, found))
        else:
            self.search(ascent, None)
            if self.best is None:
                self.blame()
        if self.best is not None and not self.late():
            found = least()
            self.kernel(found)
            self.drop(found)

    def search(self, ascent: Ascent, keeps: list[np.ndarray] | None) -> None:
        """Plans near those met: made to keep the rows, improved node by node, mixed. With `keeps`, of these choices."""
        problem, plans = self.problem, ascent.plans
        offer: Callable[[tuple[int, ...]], float] = self.offer
        if keeps is not None:
            problem, lift = restrict(problem, keeps)
            plans = [
                tuple(int(np.searchsorted(keep, c)) for keep, c in zip(keeps, plan, strict=True)) for plan in plans[-6:]
            ]
            offer = lambda plan: self.offer(lift(plan))  # noqa: E731
        plans = list(plans)
        self.repair(problem, plans, ascent.bound, offer)
        self.polish(problem, plans, offer)
        self.settle("plans")

    def near(self, plans: Sequence[tuple[int, ...]], found: Totals) -> list[np.ndarray]:
        """Per node the choices of least totals, and those of the latest plans."""
        keeps: list[np.ndarray] = []
        for node, size in enumerate(self.problem.sizes):
            line = found.nodes.get(node, np.zeros(size))
            best = np.argsort(line, kind="stable")[:_FEW]
            keeps.append(np.unique([*best.tolist(), *(plan[node] for plan in plans[-6:])]))
        return keeps

    def climb(self, pricing: Pricing, ascent: Ascent, rounds: int) -> Callable[[], Totals]:
        """Raise the bound by passes over tables."""
        steps = order(self.problem.sizes, self.problem.edges, cap=_TABLE)
        exact = is_exact(steps)
        probe = by_tables(pricing, steps, ascent, self.offer)
        for _ in range(1 if exact else 3):
            ascend(pricing, ascent, probe, rounds=rounds, deadline=self.deadline, closed=self.raise_bound)
            if not exact:
                match(pricing, steps, ascent, rounds=12, deadline=self.deadline)
            if self.raise_bound(ascent.bound) or self.late():
                break
        self.sweeps += ascent.sweeps
        return lambda: totals(*tables_at(pricing, steps, ascent))

    def tell(self, pricing: Pricing, ascent: Ascent, rounds: int) -> Callable[[], Totals]:
        """Raise the bound by messages."""
        messages = Messages.of(self.problem.nodes, self.problem.edges)
        # Where sweeps are slow the last part of a gap that is allowed anyway is left.
        closed = self.within if _open(self.problem) else self.raise_bound
        probe = by_messages(pricing, messages, ascent, self.offer, deadline=self.deadline, closed=closed)
        ascend(pricing, ascent, probe, rounds=rounds, deadline=self.deadline, closed=self.raise_bound)
        self.raise_bound(ascent.bound)
        self.sweeps += ascent.sweeps

        def least() -> Totals:
            messages.reprice(*pricing.priced(ascent.prices))
            messages.climb(
                sweeps=64,
                deadline=self.deadline,
                enough=self.raise_bound,
                least_gain=1e-5,
                rounded=lambda plan: ascent.meet(plan, self.offer),
            )
            return messages.totals()

        return least

    def repair(
        self, problem: Problem, plans: list[tuple[int, ...]], bound: float, offer: Callable[[tuple[int, ...]], float]
    ) -> None:
        """Where no plan met on the way keeps the rows: make the latest keep them, for growing fines."""
        if self.best is not None or not problem.rows:
            return
        descent = Descent.of(problem)
        fines = np.maximum([self.prices[row.name] for row in problem.rows], _fines(problem, bound))
        for plan in list(dict.fromkeys(reversed(plans)))[:6]:
            fixed = descent.repair(plan, fines)
            if fixed is not None:
                offer(fixed)
                plans.append(fixed)

    def polish(self, problem: Problem, plans: list[tuple[int, ...]], offer: Callable[[tuple[int, ...]], float]) -> None:
        """Local search from the plans met, latest first, then the best mix of them by a small exact program."""
        descent = Descent.of(problem)
        latest = list(dict.fromkeys(reversed(plans)))[:10]
        for plan in latest[:5]:
            better = descent.improve(plan)
            offer(better)
            latest.append(better)
        if not latest or (self.best is not None and _gap(self.upper, self.bound) <= self.gap):
            return
        keeps = [np.unique([plan[node] for plan in latest]) for node in range(len(problem.nodes))]
        smaller, back = restrict(problem, keeps)
        if max(smaller.sizes) > 1:
            self.exact(fold(smaller), lambda plan: offer(back(plan)), limit_s=min(2.0, self.left()), aim=None)

    def kernel(self, found: Totals) -> None:
        """The exact program over the pairs with the least totals: all others are proven to be at `aim` or above."""
        if _open(self.problem):
            return
        near: list[np.ndarray] = [np.empty(0)]
        for pair in self.problem.edges:
            matrix = found.edges(pair)
            near.append(matrix[matrix < self.upper])
        below = np.concatenate(near)
        if len(below) < 2 * _KERNEL:
            return
        aim = float(np.partition(below, _KERNEL)[_KERNEL])
        try:
            smaller, lifts = _shrunk(_under(self.problem, found, aim))
        except Infeasible:
            self.raise_bound(aim)
            return
        self.exact(smaller, lambda plan: self.offer(_lifted(plan, lifts)), limit_s=self.left() * 0.25, aim=aim)
        self.settle("kernel")

    def drop(self, found: Totals) -> None:
        """Forbid choices and pairs whose least total is not under the best plan, then shrink."""
        aim = self.upper - min(_TIE, self.gap * 0.1) * abs(self.upper)
        self.floor = min(self.floor, aim)
        self.problem = _under(self.problem, found, aim)
        try:
            self.shrink()
        except Infeasible:
            # Nothing beats the best plan.
            self.raise_bound(math.inf)
        self.settle("dropped")

    def late(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() > self.deadline

    def left(self) -> float:
        """Seconds until the deadline, at least a few to return a plan at all."""
        return max(0.1, self.deadline - time.perf_counter())

    def finish(self) -> None:
        """The exact program over what is left, or the verdict that nothing fits."""
        if max(self.problem.sizes, default=1) > 1:
            if (
                not _open(self.problem)
                and _columns(self.problem) <= _COLUMNS
                and not (self.late() and self.best is not None)
            ):
                self.exact(self.problem, self.offer, limit_s=self.left(), aim=math.inf)
        else:
            self.offer((0,) * len(self.problem.sizes))
            self.raise_bound(self.upper)
        self.settle("program")
        if self.best is None and not _open(self.problem):
            self.blame()

    def exact(
        self, problem: Problem, offer: Callable[[tuple[int, ...]], float], *, limit_s: float, aim: float | None
    ) -> None:
        """Solve as a 0/1 program; a plan that a row rejects in exact arithmetic earns tighter rows and a rerun.

        `offer` takes a plan of this problem. With `aim` the bound counts: plans outside this problem are known to be at
        `aim` or above.
        """
        if max(problem.sizes, default=1) == 1:
            plan = (0,) * len(problem.sizes)
            value = offer(plan)
            if aim is not None:
                self.raise_bound(min(aim, value))
            return
        reference = self.upper if self.best is not None else self.bound
        for shave in (0.0, 1e-6, 1e-4):
            rows = tuple(replace(row, limit=row.limit - shave * _largest(row)) for row in problem.rows)
            program = build(replace(problem, rows=rows), reference)
            outcome = run(program.matrix, solver=self.solver, time_limit_s=limit_s, gap=self.gap * 0.5)
            self.programs += 1
            self.columns = max(self.columns, len(program.matrix.cost))
            kept = True
            if outcome.values is not None:
                plan = program.plan(outcome.values)
                kept = math.isfinite(offer(plan))
            if aim is not None and shave == 0.0:
                self.raise_bound(min(aim, math.inf if outcome.infeasible else program.seconds(outcome.bound)))
            if outcome.interrupted:
                raise KeyboardInterrupt
            if kept:
                return

    def offer(self, plan: tuple[int, ...]) -> float:
        """Keep a plan of the shrunk problem if it is the best so far; its seconds, inf if a row rejects it."""
        if plan not in self.seen:
            self.seen[plan] = self.consider(_lifted(plan, self.lifts))
        return self.seen[plan]

    def consider(self, plan: tuple[int, ...]) -> float:
        """Keep a plan of the original if it is the best so far."""
        value = evaluate(self.original, plan)
        if not math.isfinite(value) or not within_rows(self.original, plan):
            return math.inf
        self.met[plan] = value
        if value < self.upper:
            self.best, self.upper = plan, value
            self.report("plan", self.upper, self.bound)
        return value

    def raise_bound(self, bound: float) -> bool:
        """Take a bound on what is left (the rest is at `floor` or above); whether the gap is closed."""
        self.bound = min(max(self.bound, min(bound, self.floor)), self.upper)
        return self.best is not None and _gap(self.upper, self.bound) <= max(self.gap * 0.01, _TIE * 10)

    def within(self, bound: float) -> bool:
        """Take a bound on what is left; whether the gap is as small as asked."""
        self.raise_bound(bound)
        return self.best is not None and _gap(self.upper, self.bound) <= self.gap

    def settle(self, stage: str) -> None:
        """Report, and stop when the gap is closed."""
        self.report(stage, self.upper, self.bound)
        if self.best is not None and _gap(self.upper, self.bound) <= self.gap:
            raise _Closed

    def solution(self, seconds: float, interrupted: bool) -> Solution:
        """What was found, with the gap that was proven."""
        if self.best is None:
            raise Infeasible("no plan that meets the limits was found in the time given; allow more time")
        bound = min(self.bound, self.upper)
        gap = _gap(self.upper, bound)
        status = "interrupted" if interrupted else "optimal" if gap <= self.gap else "feasible"
        stats = Stats(
            nodes=len(self.original.nodes),
            choices=sum(self.original.sizes),
            kept_choices=self.kept,
            sweeps=self.sweeps,
            programs=self.programs,
            columns=self.columns,
        )
        return Solution(
            choices=self.best,
            objective_s=self.upper,
            bound_s=bound,
            gap=gap,
            status=status,
            seconds=seconds,
            stats=stats,
            others=tuple(sorted(self.met, key=self.met.__getitem__)[1:_OTHERS]),
            prices={row.name: self.prices.get(row.name, 0.0) for row in self.original.rows},
        )


def _gap(upper: float, bound: float) -> float:
    return max(0.0, upper - bound) / max(abs(upper), 1e-30)


def _largest(row: Row) -> float:
    return max((float(np.abs(v).max()) for v in (*row.nodes.values(), *row.edges.values())), default=0.0)


def _fines(problem: Problem, value: float) -> np.ndarray:
    """Small fines for rows that are over: a hundredth of the whole for the largest coefficient of each."""
    return 0.01 * max(abs(value), 1e-30) / np.array([max(_largest(row), 1e-30) for row in problem.rows])


def _open(problem: Problem) -> bool:
    """Whether some pairs are not written out, so that choices must leave before all can be looked at."""
    return any(isinstance(costs, Way) for costs in problem.edges.values())


def _effort(problem: Problem) -> float:
    """Table entries of one exact pass."""
    return work(order(problem.sizes, problem.edges, cap=math.inf), problem.sizes)


def _shrunk(problem: Problem) -> tuple[Problem, list[Lift]]:
    """Clean and absorb until nothing changes."""
    lifts: list[Lift] = []
    while True:
        before = problem.sizes
        problem, more = clean(problem)
        problem, lift = absorb(problem)
        lifts += more if lift is None else [*more, lift]
        if problem.sizes == before:
            return problem, lifts


def _lifted(plan: tuple[int, ...], lifts: list[Lift]) -> tuple[int, ...]:
    for lift in reversed(lifts):
        plan = lift(plan)
    return plan


def _under(problem: Problem, found: Totals, aim: float) -> Problem:
    """The problem with every choice and pair forbidden whose least total is `aim` or above."""
    nodes = list(problem.nodes)
    for node, least in found.nodes.items():
        nodes[node] = np.where(least < aim, nodes[node], np.inf)
    edges = {
        pair: matrix if isinstance(matrix, Way) else np.where(found.edges(pair) < aim, matrix, np.inf)
        for pair, matrix in problem.edges.items()
    }
    return replace(problem, nodes=tuple(nodes), edges=edges)


def _columns(problem: Problem) -> int:
    return sum(problem.sizes) + sum(int(np.isfinite(matrix).sum()) for matrix in problem.edges.values())

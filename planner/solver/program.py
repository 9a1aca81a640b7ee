"""The problem as a 0/1 program: x picks a choice, y a pair of choices; the relaxation is nearly always integral.

Costs are scaled so that the solver's absolute tolerances (1e-7) are far below a gap that matters.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pulp

from .problem import Overlap, Problem, Row

__all__ = ["Matrix", "Outcome", "Program", "build", "highs", "run"]

# From this many columns on the program goes to HiGHS as arrays: PuLP's objects would take longer than the search.
_DIRECT = 20_000
_SPAN = 1e4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """min cost.v, lower <= v <= upper, row_lower <= A v <= row_upper, A by rows."""

    cost: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    integer: np.ndarray
    starts: np.ndarray
    index: np.ndarray
    value: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a solver found: the variables (None without any), the proven bound, and whether Ctrl-C ended it."""

    values: np.ndarray | None
    bound: float
    infeasible: bool = False
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A matrix with the way back to choices and seconds."""

    matrix: Matrix
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    scale: float
    constant: float

    def plan(self, values: np.ndarray) -> tuple[int, ...]:
        """The choices that the variables pick."""
        picked = zip(self.first, self.sizes, strict=True)
        return tuple(int(values[at : at + size].argmax()) if size > 1 else 0 for at, size in picked)

    def seconds(self, scaled: float) -> float:
        """A value of the objective in seconds."""
        return scaled / self.scale + self.constant


@dataclass(slots=True, kw_only=True, eq=False)
class _Builder:
    """Columns and rows as they come, as parts of long arrays."""

    cost: list[np.ndarray] = field(default_factory=list)
    columns: int = 0
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    row_lower: list[np.ndarray] = field(default_factory=list)
    row_upper: list[np.ndarray] = field(default_factory=list)
    rows: int = 0

    def add_columns(self, cost: np.ndarray) -> int:
        """First of the new columns."""
        self.cost.append(cost)
        self.columns += len(cost)
        return self.columns - len(cost)

    def add_rows(self, count: int, lower: float, upper: float) -> int:
        """First of the new rows."""
        self.row_lower.append(np.full(count, lower))
        self.row_upper.append(np.full(count, upper))
        self.rows += count
        return self.rows - count

    def put(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Entries of A."""
        self.entries.append((rows, columns, values))

    def matrix(self, binaries: int) -> Matrix:
        """All of it; the first columns are 0/1, the others continuous and not negative."""
        rows, columns, values = (np.concatenate([e[k] for e in self.entries]) for k in range(3))
        by_row = np.argsort(rows, kind="stable")
        starts = np.zeros(self.rows + 1, dtype=np.int32)
        np.cumsum(np.bincount(rows, minlength=self.rows), out=starts[1:])
        return Matrix(
            cost=np.concatenate(self.cost),
            lower=np.zeros(self.columns),
            upper=np.where(np.arange(self.columns) < binaries, 1.0, np.inf),
            integer=np.arange(self.columns) < binaries,
            starts=starts,
            index=columns[by_row].astype(np.int32),
            value=values[by_row].astype(np.float64),
            row_lower=np.concatenate(self.row_lower),
            row_upper=np.concatenate(self.row_upper),
        )


def build(problem: Problem, reference_s: float, *, elastic: bool = False) -> Program:
    """The program of a folded problem; `elastic` prices only what rows are over, to name the one that binds."""
    reference = reference_s if 0.0 < abs(reference_s) < math.inf else 1.0
    scale = _SPAN / abs(reference)
    weight = 0.0 if elastic else scale
    builder = _Builder()
    first: list[int] = []
    constant = 0.0
    for costs in problem.nodes:
        if len(costs) == 1:
            constant += float(costs[0])
            first.append(-1)
            continue
        able = np.isfinite(costs)
        least = float(costs[able].min()) if able.any() else 0.0
        first.append(builder.add_columns((np.where(able, costs, least) - least) * weight))
        constant += least
        # One of the choices that are not forbidden, and none of the others.
        for flags, taken in ((able, 1.0), (~able, 0.0)):
            if taken or flags.any():
                columns = first[-1] + np.flatnonzero(flags)
                row = builder.add_rows(1, taken, taken)
                builder.put(np.full(len(columns), row), columns, np.ones(len(columns)))
    binaries = builder.columns
    pairs: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, int]] = {}
    for (i, j), matrix in problem.edges.items():
        c, d = np.nonzero(np.isfinite(matrix))
        at = builder.add_columns(matrix[c, d] * weight)
        pairs[i, j] = (c, d, at)
        columns = np.arange(at, at + len(c))
        for own, size, start in ((c, matrix.shape[0], first[i]), (d, matrix.shape[1], first[j])):
            row = builder.add_rows(size, 0.0, 0.0)
            builder.put(row + own, columns, np.ones(len(own)))
            builder.put(row + np.arange(size), start + np.arange(size), -np.ones(size))
    for term in problem.rows:
        _limit(builder, term, first, pairs, elastic)
    for term in () if elastic else problem.overlaps:
        column = builder.add_columns(np.ones(1))
        row = builder.add_rows(1, -math.inf, -term.constant * scale)
        builder.put(np.array([row]), np.array([column]), -np.ones(1))
        _coefficients(builder, term, row, first, pairs, scale)
    return Program(
        matrix=builder.matrix(binaries), first=tuple(first), sizes=problem.sizes, scale=scale, constant=constant
    )


def _limit(builder: _Builder, row: Row, first: list[int], pairs: dict[Any, Any], elastic: bool) -> None:
    """A row in units of its largest coefficient, so that bytes meet the solver's tolerance."""
    largest = max((float(np.abs(v).max()) for v in (*row.nodes.values(), *row.edges.values())), default=0.0)
    scale = 100.0 / largest if largest else 1.0
    at = builder.add_rows(1, -math.inf, row.limit * scale)
    _coefficients(builder, row, at, first, pairs, scale)
    if elastic:
        column = builder.add_columns(np.ones(1))
        builder.put(np.array([at]), np.array([column]), -np.ones(1))


def _coefficients(
    builder: _Builder, term: Row | Overlap, at: int, first: list[int], pairs: dict[Any, Any], scale: float
) -> None:
    for node, line in term.nodes.items():
        builder.put(np.full(len(line), at), first[node] + np.arange(len(line)), line * scale)
    for pair, matrix in term.edges.items():
        c, d, start = pairs[pair]
        builder.put(np.full(len(c), at), start + np.arange(len(c)), matrix[c, d] * scale)


def run(matrix: Matrix, *, solver: str, time_limit_s: float, gap: float, start: np.ndarray | None = None) -> Outcome:
    """Solve with HiGHS, or with CBC when asked to or when HiGHS is not installed."""
    if solver == "cbc" or importlib.util.find_spec("highspy") is None:
        return _run_pulp(matrix, _cbc(time_limit_s, gap))
    if len(matrix.cost) < _DIRECT and matrix.integer.any():
        return _run_pulp(matrix, highs(time_limit_s, gap))
    return _run_arrays(matrix, time_limit_s, gap, start)


def _cbc(time_limit_s: float, gap: float) -> Any:
    with warnings.catch_warnings():
        # PuLP 3 still carries CBC; its successor has it as an extra under another name.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=gap, threads=1)


def highs(time_limit_s: float, gap: float) -> Any:
    """HiGHS for PuLP: silent, on one thread, ended by Ctrl-C."""

    class Interruptible(pulp.HiGHS):
        """HiGHS through PuLP, in a thread so that Ctrl-C ends the search and not the process."""

        interrupted = False

        def createAndConfigureSolver(self, lp: Any) -> None:  # noqa: N802
            with _quiet():
                super().createAndConfigureSolver(lp)

        def callSolver(self, lp: Any) -> None:  # noqa: N802
            self.interrupted = _interruptible(lp.solverModel)

    return Interruptible(msg=False, timeLimit=time_limit_s, gapRel=gap, gapAbs=0.0, threads=1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS greets on the process's stdout when first made, before it can be told not to."""
    kept, void = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(void, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(void)


def _interruptible(model: Any) -> bool:
    """Run HiGHS; whether Ctrl-C ended it."""
    model.HandleKeyboardInterrupt = True
    model.startSolve()
    interrupted = False
    while True:
        try:
            if model.wait(0.1)[0]:
                return interrupted
        except KeyboardInterrupt:
            interrupted = True
            model.cancelSolve()


def _run_pulp(matrix: Matrix, command: Any) -> Outcome:
    program = pulp.LpProblem("plan", pulp.LpMinimize)
    variables = [
        program.add_variable(f"v{k}", low, None if up == np.inf else up, pulp.LpInteger if whole else "Continuous")
        for k, (low, up, whole) in enumerate(
            zip(matrix.lower.tolist(), matrix.upper.tolist(), matrix.integer.tolist(), strict=True)
        )
    ]
    program += pulp.LpAffineExpression(zip(variables, matrix.cost.tolist(), strict=True))
    index, value = matrix.index.tolist(), matrix.value.tolist()
    for row, (low, high) in enumerate(zip(matrix.row_lower.tolist(), matrix.row_upper.tolist(), strict=True)):
        part = range(matrix.starts[row], matrix.starts[row + 1])
        terms = pulp.LpAffineExpression([(variables[index[k]], value[k]) for k in part])
        program += pulp.LpConstraint(terms, pulp.LpConstraintEQ if low == high else pulp.LpConstraintLE, rhs=high)
    began = time.perf_counter()
    program.solve(command)
    interrupted = bool(getattr(command, "interrupted", False))
    if program.sol_status in (pulp.LpSolutionInfeasible, pulp.LpSolutionUnbounded):
        return Outcome(values=None, bound=math.inf, infeasible=True)
    model = getattr(program, "solverModel", None)
    proven = program.sol_status == pulp.LpSolutionOptimal and not interrupted
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Outcome(values=None, bound=_bound(model), interrupted=interrupted)
    values = np.array([variable.varValue or 0.0 for variable in variables])
    objective = float(values @ matrix.cost)
    late = command.timeLimit is not None and time.perf_counter() - began >= command.timeLimit
    if model is not None:
        bound = _bound(model)
    else:
        # CBC through PuLP tells no bound: its gap option is what "optimal" proves.
        allowed = abs(objective) * float(command.optionsDict.get("gapRel") or 0.0)
        bound = objective - allowed if proven and not late else -math.inf
    return Outcome(values=values, bound=bound, interrupted=interrupted)


def _bound(model: Any) -> float:
    return float(model.getInfo().mip_dual_bound) if model is not None else -math.inf


def _run_arrays(matrix: Matrix, time_limit_s: float, gap: float, start: np.ndarray | None) -> Outcome:
    import highspy

    with _quiet():
        model: Any = highspy.Highs()
    for name, setting in (("output_flag", False), ("threads", 1), ("time_limit", max(0.01, time_limit_s))):
        model.setOptionValue(name, setting)
    model.setOptionValue("mip_rel_gap", gap)
    model.setOptionValue("mip_abs_gap", 0.0)
    lp: Any = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(matrix.cost), len(matrix.row_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = matrix.cost, matrix.lower, matrix.upper
    lp.row_lower_, lp.row_upper_ = matrix.row_lower, matrix.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.starts, matrix.index, matrix.value
    whole = bool(matrix.integer.any())
    if whole:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(flag)] for flag in matrix.integer]
    model.passModel(lp)
    if start is not None:
        guess: Any = highspy.HighsSolution()
        guess.col_value = start
        model.setSolution(guess)
    if whole:
        interrupted = _interruptible(model)
    else:
        interrupted = False
        model.run()
    status = model.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Outcome(values=None, bound=math.inf, infeasible=True, interrupted=interrupted)
    info = model.getInfo()
    bound = float(info.mip_dual_bound if whole else info.objective_function_value)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(model.getSolution().col_value) if found else None
    return Outcome(values=values, bound=bound, interrupted=interrupted)

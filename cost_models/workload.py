"""A planned step as a function of its workload: sizes are expressions, times follow without a new capture.

A step is a list of *primitives* (one kernel or collective each, its sizes SymPy expressions of the workload's symbols)
and of *lines* over them: how often each primitive is in the compute of an op, or in a move, and what a move can hide
behind. Sizes are compiled to one function and all primitives of a kind are priced at once, so that a new shape takes
well under a millisecond; the prices are those of `Prices`, so they are exactly what a new capture would come to.

Packed sequences: everything but attention sees their tokens, attention each sequence by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..plans.errors import RequestError
from .kernels import attention_flops
from .prices import Prices

__all__ = ["Line", "Move", "Primitive", "Workload"]

# Names of the functions that stand for prices in expressions.
_NAMES = {"product": "gemm_s", "attention": "attention_s", "memory": "memory_s", "fresh": "fresh_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """One kernel or collective. `sizes` by kind: product (m, n, k, batch), attention (batch, heads, queries, keys, head
    size), memory and fresh (bytes), else the bytes of a collective along mesh axis `axis`."""

    kind: str
    sizes: tuple[Any, ...]
    dtype: str = ""
    causal: bool = False
    backward: bool = False
    axis: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds of one op's compute: the sum of primitives (number, how often), and a constant."""

    parts: tuple[tuple[int, float], ...]
    constant_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move, and how often it is paid; `behind` names lines of which the least hides it, None where nothing does."""

    line: Line
    weight: float
    behind: tuple[int, ...] | None


@dataclass(slots=True, kw_only=True, eq=False)
class Workload:
    """One planned step. `ops` gives per op its name, the line of its compute and how many it stands for; `sequence`
    names the symbol that is a sequence's length, `constant_s` what does not depend on the workload."""

    symbols: tuple[str, ...]
    primitives: tuple[Primitive, ...]
    lines: tuple[Line, ...]
    ops: tuple[tuple[str, int, float], ...]
    moves: tuple[Move, ...]
    constant_s: float
    prices: Prices
    sequence: str | None = None
    _sizes: Callable[..., Any] | None = None
    _groups: dict[Any, np.ndarray] = field(default_factory=dict)
    _sums: _Sums | None = None

    def seconds(self, **sizes: float | np.ndarray) -> Any:
        """Seconds of the step at these values of `symbols`: one number each, or arrays of one length for as many
        micro-batches at once."""
        values = self._values(sizes)
        times = self._times(np.stack(np.broadcast_arrays(*values)))
        found = self._total(times)
        return float(found[0]) if all(v.ndim == 0 for v in map(np.asarray, sizes.values())) else found

    def packed_s(self, lengths: Sequence[int], **sizes: float) -> float:
        """Seconds of a step on sequences of `lengths` packed into one: attention sees each by itself. `sizes` gives the
        other symbols. RequestError where no symbol is the length of a sequence."""
        if self.sequence is None or self.sequence not in self.symbols:
            raise RequestError(f"'sequence' must be one of {', '.join(self.symbols)}, got {self.sequence!r}; name it")
        each = _counts("lengths", lengths)
        if each.ndim != 1 or not len(each):
            raise RequestError(f"'lengths' must be a list of sequence lengths, got {lengths!r:.80}; e.g. [512, 384]")
        values = self._values({**sizes, self.sequence: np.append(each, each.sum())})
        times = self._times(np.stack(np.broadcast_arrays(*values)))
        whole = times[-1].copy()
        attention = np.array([p.kind == "attention" for p in self.primitives])
        whole[attention] = times[:-1, attention].sum(axis=0)
        return float(self._total(whole[None, :])[0])

    def flops(self) -> Any:
        """FLOP of all products and attention of the step, a SymPy expression."""
        return sum((weight * often * self._flops(self.primitives[at])
                    for _, line, weight in self.ops for at, often in self.lines[line].parts), 0)  # fmt: skip

    def moved_bytes(self) -> Any:
        """Bytes that memory-bound kernels move, a SymPy expression."""
        return sum((weight * often * self.primitives[at].sizes[0] for _, line, weight in self.ops
                    for at, often in self.lines[line].parts if self.primitives[at].kind == "memory"), 0)  # fmt: skip

    def expression(self, op: str) -> Any:
        """Seconds of one op as a SymPy expression over price functions (gemm_s, attention_s, memory_s, fresh_s)."""
        import sympy

        for name, line, _ in self.ops:
            if name == op:
                parts = self.lines[line]
                return parts.constant_s + sum(
                    often * sympy.Function(_NAMES[self.primitives[at].kind])(*self.primitives[at].sizes)
                    for at, often in parts.parts
                )
        raise RequestError(f"'op' must be one of the plan's ops, got {op!r}; see `meshwright show`")

    @staticmethod
    def _flops(primitive: Primitive) -> Any:
        if primitive.kind == "product":
            m, n, k, batch = primitive.sizes
            return 2 * m * n * k * batch
        if primitive.kind == "attention":
            b, h, q, kv, d = primitive.sizes
            one = attention_flops(1, 1, 1, 1, 1, causal=False, backward=primitive.backward)
            # A causal mask on as many queries as keys leaves half of the pairs.
            return one * b * h * d * (q * (kv - q / 2) if primitive.causal else q * kv)
        return 0

    def _values(self, sizes: Mapping[str, float | np.ndarray]) -> list[np.ndarray]:
        if set(sizes) != set(self.symbols):
            raise RequestError(
                f"'sizes' must give {', '.join(self.symbols)}, got {', '.join(sizes) or 'none'}; name each once"
            )
        found = [np.atleast_1d(_counts(name, sizes[name])) for name in self.symbols]
        if len({len(values) for values in found if values.shape != (1,)}) > 1 or any(v.ndim != 1 for v in found):
            raise RequestError(
                f"'sizes' must be numbers or arrays of one length, got shapes {[v.shape for v in found]}; give as many "
                "values of each"
            )
        return found

    def _compiled(self) -> Callable[..., Any]:
        found = self._sizes
        if found is None:
            import sympy

            symbols = [sympy.Symbol(name, integer=True, positive=True) for name in self.symbols]
            flat = [sympy.sympify(size) for primitive in self.primitives for size in primitive.sizes]
            found = self._sizes = sympy.lambdify(symbols, flat, "numpy", cse=True)
        return found

    def _times(self, values: np.ndarray) -> np.ndarray:
        """Seconds [case, primitive] at values [symbol, case]."""
        cases = values.shape[1]
        flat = np.empty((sum(len(p.sizes) for p in self.primitives), cases))
        for at, size in enumerate(self._compiled()(*values)):
            flat[at] = size
        if not self._groups:
            self._group()
        times = np.empty((cases, len(self.primitives)))
        for (kind, dtype, causal, backward, axis), where in self._groups.items():
            members, rows = where[0], where[1:]
            args = [flat[row] for row in rows]
            times[:, members] = np.transpose(self._priced(kind, args, dtype, causal, backward, axis))
        return times

    def _group(self) -> None:
        """Primitives that one call prices: their numbers, then the rows of each of their sizes."""
        starts = np.cumsum([0, *(len(p.sizes) for p in self.primitives)])
        found: dict[Any, list[int]] = {}
        for at, p in enumerate(self.primitives):
            found.setdefault((p.kind, p.dtype, p.causal, p.backward, p.axis), []).append(at)
        for key, members in found.items():
            width = len(self.primitives[members[0]].sizes)
            self._groups[key] = np.array([members, *([starts[at] + i for at in members] for i in range(width))])

    def _priced(self, kind: str, args: list[np.ndarray], dtype: str, causal: bool, backward: bool, axis: int) -> Any:
        prices = self.prices
        if kind == "product":
            return prices.gemm_s(*args, dtype=dtype)
        if kind == "attention":
            return prices.attention_s(*args, dtype=dtype, causal=causal, backward=backward)
        if kind == "memory":
            return prices.memory_s(args[0])
        if kind == "fresh":
            return prices.fresh_s(args[0])
        return prices.collective_s(kind, args[0], axis)

    def _total(self, times: np.ndarray) -> np.ndarray:
        """Seconds of a step from times [case, primitive]."""
        if self._sums is None:
            self._sums = _Sums.of(self)
        return self._sums.total(times, self.prices.unhidden)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sums:
    """Lines and moves as matrices: seconds are `times @ lines + constants`. A move is behind lines `behind` [move,
    most], where entries beyond its own repeat its first."""

    lines: np.ndarray
    line_constants: np.ndarray
    op_weights: np.ndarray
    moves: np.ndarray
    move_constants: np.ndarray
    move_weights: np.ndarray
    hidden: np.ndarray
    behind: np.ndarray
    constant_s: float

    @classmethod
    def of(cls, workload: Workload) -> _Sums:
        """The matrices of a workload."""
        count, moves = len(workload.primitives), workload.moves
        weights = np.zeros(len(workload.lines) + 1)
        for _, line, weight in workload.ops:
            weights[line] += weight
        none = len(workload.lines)  # a line of no seconds, behind which nothing hides
        most = max((len(move.behind or ()) for move in moves), default=0) or 1
        behind = [[*(m.behind or (none,)), *[(m.behind or (none,))[0]] * most][:most] for m in moves]
        empty = Line(parts=())
        return cls(
            lines=_matrix([*workload.lines, empty], count),
            line_constants=np.array([*(line.constant_s for line in workload.lines), 0.0]),
            op_weights=weights,
            moves=_matrix([move.line for move in moves], count),
            move_constants=np.array([move.line.constant_s for move in moves]),
            move_weights=np.array([move.weight for move in moves]),
            hidden=np.array([move.behind is not None for move in moves], dtype=bool),
            behind=np.array(behind, dtype=np.int64).reshape(len(moves), most),
            constant_s=workload.constant_s,
        )

    def total(self, times: np.ndarray, unhidden: float) -> np.ndarray:
        """Seconds of a step per case."""
        lines = times @ self.lines + self.line_constants
        total = self.constant_s + lines @ self.op_weights
        if not len(self.move_weights):
            return total
        costs = times @ self.moves + self.move_constants
        windows = lines[:, self.behind].min(axis=2)
        exposed = np.where(self.hidden, np.maximum(costs * unhidden, costs - windows), costs)
        return total + exposed @ self.move_weights


def _counts(name: str, given: Any) -> np.ndarray:
    """Whole numbers from 1 up as float64, of the shape that is given. RequestError for anything else."""
    try:
        found = np.asarray(given)
    except ValueError:
        found = np.asarray(None)
    if found.dtype.kind not in "iuf" or not (np.isfinite(found) & (found >= 1)).all() or (found % 1 != 0).any():
        raise RequestError(
            f"'{name}' must be whole numbers from 1 up, got {given!r:.80}; a step has no part of a sample or token"
        )
    return found.astype(np.float64)


def _matrix(lines: Sequence[Line], primitives: int) -> np.ndarray:
    """Coefficients [primitive, line]."""
    found = np.zeros((primitives, len(lines)))
    for at, line in enumerate(lines):
        for primitive, often in line.parts:
            found[primitive, at] += often
    return found

"""A planned step as a function of its batch and sequence length: see cost_models/workload.py.

The model is captured at a few sizes of its dynamic dims. Every size in it is then known as a polynomial in them, linear
in each, which one more capture confirms. The costs of the chosen strategies are worked out once more, by the very
code that prices a plan, with these polynomials in place of numbers and with prices that write down what they are asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx, nn

from ..cost_models.calibration import Calibration
from ..cost_models.prices import Prices
from ..cost_models.workload import Line, Move, Primitive, Workload
from ..passes.blocks import with_fewer_blocks
from ..passes.capture import capture
from ..passes.graph import tensor_args, values_of
from ..passes.trees import flatten_call
from ..plans.errors import RequestError
from ..plans.layouts import Layout, shard_dim
from ..plans.marks import KEPT
from ..plans.plan import DynamicDim, Plan
from .api import Draft
from .arguments import check_arguments
from .dynamic import call_at, dynamic_dims
from .explaining.explain import reopen
from .sharding.decisions import Decision, Reading
from .sharding.hiding import keeps
from .sharding.op_costs import Local, op_seconds
from .sharding.own_rules import OpRule, attach_rules
from .sharding.transitions import STEP_S, step_between
from .stages.shares import charged

__all__ = ["Writer", "workload_of"]

Sizes = dict[fx.Node, list[tuple[Any, ...] | None]]
# How far the captured sizes lie apart, as multiples of the planned ones.
_PROBES = (1, 2, 3)


def workload_of(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic: object,
    sequence: str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    rules: Sequence[OpRule] = (),
    calibration: Calibration | str | None = None,
) -> Workload:
    """The step of `plan` for any size of the dims that `dynamic` names, as in `plan`; its symbols are their names.

    `sequence` names the symbol that is the length of one sequence, for packed ones. The steps by which tensors move are
    the cheapest at the planned sizes. Raises RequestError where sizes do not grow as polynomials that are linear in
    each symbol, and for plans with a pipeline.
    """
    check_arguments(
        plan=plan, model=model, args=args, kwargs=kwargs, sequence=sequence, loss=loss, rules=rules,
        calibration=calibration,
    )  # fmt: skip
    if plan.pipeline is not None:
        raise RequestError("'plan' must have no pipeline, got one; simulate its stages")
    prepared, found = reopen(plan, model, args, kwargs, loss=loss, rules=rules, calibration=calibration)
    choices = [found.choices[index] for index in range(len(prepared.formulation.decisions))]
    dims = dynamic_dims(model, args, kwargs or {}, dynamic).dims
    if sequence is not None and sequence not in {d.symbol for d in dims}:
        raise RequestError(
            f"'sequence' must be one of {', '.join(sorted({d.symbol for d in dims}))}, got {sequence!r}; name it so"
        )
    sizes = _symbolic_sizes(prepared, model, args, kwargs or {}, dims, loss, rules)
    return Writer(prepared, choices, sizes).written(tuple(dict.fromkeys(d.symbol for d in dims)), sequence)


def _symbolic_sizes(
    prepared: Draft,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dims: Sequence[DynamicDim],
    loss: Callable[[Any], torch.Tensor] | None,
    rules: Sequence[OpRule],
) -> Sizes:
    """The shapes of all values as expressions of the symbols."""
    tensors, tree = flatten_call(args, kwargs)
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(tree.names, tensors, strict=True)}
    base: dict[str, int] = {}
    for dim in dims:
        size = shapes[dim.input][dim.dim]
        if base.setdefault(dim.symbol, size) != size:
            raise RequestError(
                f"'dynamic' must give {dim.symbol} to dims of one size, got {base[dim.symbol]} and {size}"
            )
    if not base:
        raise RequestError(f"'dynamic' must name the dims whose size changes, got {dims}; give one")
    names = list(base)
    captured, blocks = prepared.captured, prepared.blocks
    few = with_fewer_blocks(model, blocks.cut)
    corners = [dict(zip(names, c, strict=True)) for c in itertools.product(_PROBES[:2], repeat=len(names))]
    seen: list[tuple[dict[str, int], Mapping[str, fx.Node]]] = []
    for times in (*corners, dict.fromkeys(names, _PROBES[2])):
        at = {name: base[name] * times[name] for name in names}
        if set(times.values()) == {1}:
            seen.append((at, {name: node for node, name in captured.names.items()}))
            continue
        call = call_at(tensors, tree, {(d.input, d.dim): at[d.symbol] for d in dims})
        other = capture(few, *call, loss=loss, recompute=_mode(prepared), again=captured.again)
        attach_rules(other, rules)
        seen.append((at, {name: node for node, name in other.names.items()}))
    return _fitted(prepared, names, seen)


def _mode(prepared: Draft) -> Any:
    """The recomputation that the plan was made with."""
    return prepared.options.recompute


def _fitted(prepared: Draft, names: list[str], seen: list[tuple[dict[str, int], Mapping[str, fx.Node]]]) -> Sizes:
    symbols = [sympy.Symbol(name, integer=True, positive=True) for name in names]
    terms = [c for n in range(len(names) + 1) for c in itertools.combinations(range(len(names)), n)]
    points = [[at[name] for name in names] for at, _ in seen]
    matrix = sympy.Matrix([[sympy.prod([p[i] for i in term]) for term in terms] for p in points[:-1]])
    inverse = matrix.inv()
    known: dict[tuple[int, ...], Any] = {}

    def of(values: tuple[int, ...], name: str) -> Any:
        if len(set(values)) == 1:
            return sympy.Integer(values[0])
        if values not in known:
            weights = inverse * sympy.Matrix(values[:-1])
            found: Any = sum(w * sympy.prod([symbols[i] for i in term]) for w, term in zip(weights, terms, strict=True))
            if found.subs(dict(zip(symbols, points[-1], strict=True))) != values[-1]:
                raise RequestError(
                    f"'dynamic' must name dims in which all sizes are linear, got {values} for a size of {name}; leave "
                    "one out"
                )
            known[values] = found
        return known[values]

    sizes: Sizes = {}
    for node, name in prepared.captured.names.items():
        twins = [nodes.get(name) for _, nodes in seen]
        if any(twin is None for twin in twins):
            raise RequestError(f"'dynamic' must not change which ops the model runs, got {name} at some sizes only")
        values = [values_of(twin) for twin in twins if twin is not None]
        sizes[node] = []
        for one in zip(*values, strict=True):
            shapes = [tuple(v.shape) for v in one if v is not None]
            sizes[node].append(tuple(of(seen_, name) for seen_ in zip(*shapes, strict=True)) if shapes else None)
    return sizes


class _Recorder(SimpleNamespace):
    """Prices that write down what they are asked and give a symbol for each answer."""

    def __init__(self, prices: Prices) -> None:
        super().__init__(device=prices.device, launch_s=prices.launch_s, view_s=prices.view_s)
        self.known: dict[Primitive, int] = {}

    def _put(self, primitive: Primitive) -> np.ndarray:
        at = self.known.setdefault(primitive, len(self.known))
        return np.array([sympy.Symbol(f"time{at}")], dtype=object)

    def gemm_s(self, m: Any, n: Any, k: Any, batch: Any = 1, dtype: str = "bfloat16") -> np.ndarray:
        """A product."""
        return self._put(Primitive(kind="product", sizes=_ones(m, n, k, batch), dtype=dtype))

    def attention_s(self, b: Any, h: Any, q: Any, kv: Any, d: Any, dtype: str = "bfloat16", **how: bool) -> np.ndarray:
        """An attention; `how` is causal and backward."""
        return self._put(Primitive(kind="attention", sizes=_ones(b, h, q, kv, d), dtype=dtype, **how))

    def memory_s(self, moved: Any) -> np.ndarray:
        """A kernel bound by memory."""
        return self._put(Primitive(kind="memory", sizes=_ones(moved)))

    def fresh_s(self, made: Any) -> np.ndarray:
        """New memory."""
        return self._put(Primitive(kind="fresh", sizes=_ones(made)))

    def collective_s(self, kind: str, size: Any, axis: int) -> np.ndarray:
        """A collective."""
        return self._put(Primitive(kind=kind, sizes=_ones(size), axis=axis))


def _ones(*values: Any) -> tuple[Any, ...]:
    return tuple(sympy.sympify(np.ravel(np.asarray(value, dtype=object))[0]) for value in values)


class Writer:
    """Writes down the costs of a solved draft as lines over primitives, at `sizes` that are expressions or numbers."""

    def __init__(self, prepared: Draft, choices: Sequence[int], sizes: Sizes) -> None:
        self.prepared, self.formulation, self.choices, self.sizes = prepared, prepared.formulation, choices, sizes
        self.recorder = _Recorder(self.formulation.prices)
        self.lines: list[Line] = []
        self.of: dict[tuple[int, int], int] = {}

    def written(self, symbols: tuple[str, ...], sequence: str | None) -> Workload:
        """The workload."""
        form = self.formulation
        captured, names, blocks = form.captured, form.captured.names, form.blocks
        ops, constant = [], form.prices.step_s
        for node in captured.ops():
            if node in form.of:
                index = form.of[node]
                ops.append((names[node], self.line(index, self.choices[index]), blocks.share(names[node])))
        for node, source in captured.sources.items():
            if source.kind == "parameter" and node in form.of:
                index = form.of[node]
                constant += float(form.decisions[index].seconds[self.choices[index]]) * blocks.share(source.name)
        moves = [move for move in self.moves() if move.line.parts or move.line.constant_s]
        return Workload(
            symbols=symbols,
            primitives=tuple(self.recorder.known),
            lines=tuple(self.lines),
            ops=tuple(ops),
            moves=tuple(moves),
            constant_s=constant,
            prices=form.prices,
            sequence=sequence,
        )

    def line(self, index: int, choice: int) -> int:
        """The number of the line of one strategy of a decision."""
        if (index, choice) not in self.of:
            decision = self.formulation.decisions[index]
            self.of[index, choice] = len(self.lines)
            self.lines.append(self._line(decision, choice))
        return self.of[index, choice]

    def _line(self, decision: Decision, choice: int) -> Line:
        node = decision.node
        if decision.kind != "op" or node is None:
            return Line(parts=(), constant_s=float(decision.seconds[choice]))
        strategy = decision.strategies[choice]
        ins = [self._local(source, layout) for source, layout in zip(tensor_args(node), strategy.ins, strict=True)]
        outs = [
            None if layout is None else self._local(node, layout, at) for at, layout in enumerate(strategy.outs)
        ]  # fmt: skip
        prices: Any = self.recorder
        return _linear(op_seconds(node, outs, ins, prices, self.formulation.fusion, [strategy.local])[0])

    def _piece(self, node: fx.Node, layout: Layout, output: int) -> tuple[Any, ...]:
        """The local shape of the fullest device."""
        found: list[Any] = list(self.sizes[node][output] or ())
        for axis, placement in enumerate(layout):
            dim = shard_dim(placement)
            if dim is not None:
                found[dim] = sympy.ceiling(found[dim] / self.formulation.mesh.shape[axis])
        return tuple(found)

    def _local(self, node: fx.Node, layout: Layout, output: int = 0) -> Local:
        value = values_of(node)[output]
        assert value is not None
        shape = self._piece(node, layout, output)
        table = np.empty((1, len(shape)), dtype=object)
        table[0, :] = shape
        return Local(table, np.array([sympy.prod(shape) * value.element_size()], dtype=object))

    # -- moves -------------------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """Every move of the step, as `shares_of` charges it."""
        form = self.formulation
        found = [move for _, move in self.read_moves()]
        for name, reading in zip(form.captured.grads, form.grads, strict=True):
            found.append(self.gradient_move(reading, form.blocks.share(name) * form.accumulation.share))
        return found

    def gradient_move(self, reading: Reading, weight: float = 1.0) -> Move:
        """The reduction of a gradient."""
        return self._move(reading, reading.source, reading.reader, weight, gradient=True)

    def read_moves(self) -> list[tuple[Reading, Move]]:
        """The moves of what ops read; one that several share is the first one's."""
        form, found, served = self.formulation, [], set()
        for reading in form.readings:
            weight = form.blocks.share(form.captured.names[charged(form, reading)])
            if reading.via is None:
                found.append((reading, self._move(reading, reading.source, reading.reader, weight)))
                continue
            found.append((reading, self._move(reading, reading.via, reading.reader, weight)))
            if (reading.of, reading.output, reading.backward) not in served:
                served.add((reading.of, reading.output, reading.backward))
                found.append((reading, self._move(reading, reading.source, reading.via, weight)))
        return found

    def _move(self, reading: Reading, start: int, end: int, weight: float, *, gradient: bool = False) -> Move:
        form, choices = self.formulation, self.choices
        a, b = form.decisions[start], form.decisions[end]
        output = reading.output if start == reading.source else 0
        here = a.strategies[choices[start]].outs[output]
        chosen = b.strategies[choices[end]]
        there = chosen.ins[reading.at] if b.kind == "op" else chosen.outs[0]
        table = a.tables[output]
        assert table is not None and here is not None and there is not None
        value = values_of(reading.of)[reading.output]
        assert value is not None
        if here not in table.index or there not in table.index:
            table = form.transitions.table(value.shape, value.element_size(), extremes=True)
        line = self._way(reading, value.element_size(), here, there, table.way(here, there))
        if not (reading.early or (gradient and form.accumulation.hides)):
            return Move(line=line, weight=weight, behind=None)
        return Move(line=line, weight=weight, behind=self._behind(reading, start, end, gradient=gradient))

    def _behind(self, reading: Reading, start: int, end: int, *, gradient: bool) -> tuple[int, ...]:
        """Lines of which the least hides a move, as `hiding.behind_what` has it."""
        decisions, choices = self.formulation.decisions, self.choices
        if gradient:
            return (self.line(start, choices[start]),) if decisions[start].kind == "op" else ()
        a, b = decisions[start], decisions[end]
        once = self.formulation.accumulation.once
        if keeps(b) and (once or b.strategies[choices[end]].local != KEPT):
            return ()
        if keeps(a) and not once and not reading.backward and a.strategies[choices[start]].local == KEPT:
            return ()
        if b.kind == "op" and not keeps(b):
            return (self.line(end, choices[end]),)
        return tuple(self.line(reading.behind, choice) for choice in range(len(decisions[reading.behind].strategies)))

    def _way(self, reading: Reading, item: int, here: Layout, there: Layout, texts: Sequence[str]) -> Line:
        """The steps of a way, each as a collective and the copies that it takes."""
        axes, total, at = self.formulation.mesh.axis_names, sympy.Integer(0), here
        for text in texts:
            for axis, new in itertools.product(range(len(axes)), _placements(here, there, text)):
                kind, found, copies = step_between(at[axis], new, axes[axis])
                if found == text:
                    break
            else:
                raise AssertionError(f"no step {text} from {at}")
            after = (*at[:axis], new, *at[axis + 1 :])
            before_b, after_b = (sympy.prod(self._piece(reading.of, x, reading.output)) * item for x in (at, after))
            grows = shard_dim(at[axis]) is not None and shard_dim(new) is None
            shrinks = shard_dim(at[axis]) is None and shard_dim(new) is not None
            larger = after_b if grows else before_b if shrinks or before_b == after_b else sympy.Max(before_b, after_b)
            total = total + STEP_S
            if kind not in ("slice", "keep_first"):
                whole = larger * (self.formulation.mesh.shape[axis] if kind == "all_to_all" else 1)
                total = total + self.recorder.collective_s(str(kind), whole, axis)[0]
            if kind != "slice" and copies > 0:
                total = total + self.recorder.memory_s(larger * copies)[0]
            at = after
        assert at == there
        return _linear(total)


def _placements(here: Layout, there: Layout, text: str) -> list[str]:
    """What a step may lead to."""
    numbers = [f"S({word})" for word in text.rstrip(")").replace("(", ",").split(",") if word.strip().isdigit()]
    words = [f"S({word.strip()})" for word in text.rstrip(")").split(",") if word.strip().isdigit()]
    return list(dict.fromkeys([*there, *here, *words, *numbers, "R", "P(sum)"]))


def _linear(seconds: Any) -> Line:
    """A sum of recorded times and a constant."""
    parts, constant = [], 0.0
    for term, often in sympy.expand(sympy.sympify(seconds)).as_coefficients_dict().items():
        if term.is_Symbol:
            parts.append((int(term.name.removeprefix("time")), float(often)))
        else:
            constant += float(term * often)
    return Line(parts=tuple(parts), constant_s=constant)

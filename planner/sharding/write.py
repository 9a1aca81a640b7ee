"""From a solution to a plan: names, layouts, steps and times, one entry per class of nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ...cost_models.uncertainty import FAMILIES, interval_s
from ...passes.again import computed_again
from ...passes.graph import Captured, tensor_args, values_of
from ...passes.naming import op_name
from ...plans.clusters import Cluster
from ...plans.layouts import Layout
from ...plans.marks import LATE
from ...plans.plan import Block, Edge, Model, Node, Options, Plan, Predicted, Solver, Tensor
from ...plans.version import VERSION
from ..solver.problem import Solution
from .decisions import Decision, Formulation, Reading
from .folding import MIDDLE, Blocks
from .op_costs import dtype_name, family_of
from .timeline import Timeline

__all__ = ["model_of", "write_plan"]


def write_plan(
    formulation: Formulation,
    timeline: Timeline,
    solution: Solution,
    *,
    model: Model,
    cluster: Cluster,
    options: Options,
    limit: int | None,
) -> Plan:
    """The plan of a solved formulation. `limit` is the memory limit per device in bytes."""
    return Plan(
        meshwright_version=VERSION,
        torch_version=str(torch.__version__),
        model=model,
        cluster=cluster,
        mesh=formulation.mesh,
        parameters=_sources(formulation, solution.choices, ("parameter",)),
        buffers=_sources(formulation, solution.choices, ("buffer", "constant")),
        inputs=_sources(formulation, solution.choices, ("input",)),
        outputs=_outputs(formulation, solution.choices),
        nodes=_nodes(formulation, solution.choices),
        options=options,
        predicted=_predicted(formulation, timeline, solution, limit),
        solver=Solver(
            status=solution.status,
            objective_s=solution.objective_s,
            bound_s=max(0.0, solution.bound_s),
            # Without a bound, when the time was up before there was one, zero is: no plan takes less.
            gap=min(max(0.0, solution.gap), 1.0),
            seconds=solution.seconds,
            choices=sum(formulation.problem.sizes),
        ),
        calibration=formulation.prices.source,
    )


def model_of(captured: Captured, name: str, blocks: Blocks) -> Model:
    """What a plan remembers of the model it is for: a digest of names, shapes, dtypes and ops, never of weights."""
    lines: dict[str, None] = {}
    count = size = 0
    for source in captured.sources.values():
        pattern = blocks.pattern(source.name)
        lines.setdefault(f"{source.kind} {pattern} {source.shape} {source.dtype} {source.requires_grad}")
        if source.kind == "parameter":
            times = blocks.share(source.name)
            numel = int(torch.Size(source.shape).numel())
            count += times * numel
            size += times * numel * source.dtype.itemsize
    stamps = sorted((s for run in blocks.runs for s in run.stamps), key=lambda s: (s.path, s.numbers.start))
    for stamp in stamps:
        part = "" if stamp.mark == "*" else f" of {stamp.mark}"
        lines.setdefault(f"blocks {stamp.path} {len(stamp.numbers)}{part}")
    shown = tuple(Block(pattern=stamp.pattern, count=len(stamp.numbers)) for stamp in stamps)
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return Model(name=name, digest=digest, parameters=count, parameter_bytes=size, blocks=shown)


def _tensor(formulation: Formulation, decision: Decision, name: str, layout: Layout) -> Tensor:
    value = values_of(decision.node)[0]  # type: ignore[arg-type]
    assert value is not None
    return Tensor(name=name, shape=tuple(value.shape), dtype=dtype_name(value.dtype), layout=layout)


def _sources(formulation: Formulation, choices: Sequence[int], kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
    found: dict[str, Tensor] = {}
    for node, source in formulation.captured.sources.items():
        if source.kind in kinds and node in formulation.of:
            index = formulation.of[node]
            decision = formulation.decisions[index]
            layout = decision.strategies[choices[index]].outs[0]
            name = _entry_name(formulation, decision, source.name)
            found.setdefault(name, _tensor(formulation, decision, name, layout))  # type: ignore[arg-type]
    return tuple(found.values())


def _entry_name(formulation: Formulation, decision: Decision, name: str) -> str:
    """The pattern for the class that most blocks belong to, the node's own name for the exceptions."""
    blocks = formulation.blocks
    pattern = blocks.pattern(name)
    if pattern == name:
        return name
    return pattern if formulation.owner(decision) is decision and decision.weight > 1 else name


def _outputs(formulation: Formulation, choices: Sequence[int]) -> tuple[Tensor, ...]:
    found = []
    names = formulation.captured.output_tree.names
    for key, index in formulation.results.items():
        decision = formulation.decisions[index]
        layout = decision.strategies[choices[index]].outs[0]
        found.append(_tensor(formulation, decision, names[int(key.split(".")[1])], layout))  # type: ignore[arg-type]
    return tuple(found)


def _nodes(formulation: Formulation, choices: Sequence[int]) -> tuple[Node, ...]:
    captured = formulation.captured
    by_use: dict[tuple, Reading] = {
        (r.node, r.at): r for r in formulation.readings if formulation.decisions[r.reader].kind == "op"
    }
    found: dict[str, Node] = {}
    place = {node: formulation.blocks.place(captured.names[node]) for node in captured.ops()}
    # The second block speaks for its kind: it has a block before it, as most have.
    for node in sorted(captured.ops(), key=lambda n: (p := place[n]) is None or p[1] != MIDDLE):
        if op_name(node) == "getitem":
            continue
        index = formulation.of[node]
        decision = formulation.decisions[index]
        name = _entry_name(formulation, decision, captured.names[node])
        edges = tuple(_edge(formulation, choices, by_use[node, at]) for at, _ in enumerate(tensor_args(node)))
        strategy = decision.strategies[choices[index]]
        entry = Node(
            name=name,
            op=op_name(node),
            outputs=strategy.outs,
            inputs=edges,
            rule=strategy.local,
            time_s=float(decision.seconds[choices[index]]),
            count=max(1, round(decision.weight)) if name != captured.names[node] else 1,
        )
        known = found.get(name)
        if known is None:
            found[name] = entry
        elif [e.steps for e in known.inputs] != [e.steps for e in edges]:
            own = captured.names[node]
            found[own] = Node(**{**{f: getattr(entry, f) for f in entry.__struct_fields__}, "name": own, "count": 1})
    for name, entry in _result_nodes(formulation, choices):
        found.setdefault(name, entry)
    order = {formulation.blocks.pattern(captured.names[n]): i for i, n in enumerate(reversed(captured.ops()))}
    return tuple(sorted(found.values(), key=lambda n: -order.get(formulation.blocks.pattern(n.name), -1)))


def _result_nodes(formulation: Formulation, choices: Sequence[int]) -> list[tuple[str, Node]]:
    found: dict[str, Node] = {}
    for reading in formulation.readings:
        if formulation.decisions[reading.reader].kind == "output":
            key = next(k for k, v in formulation.results.items() if v == reading.reader)
            found[f"{key}::output"] = _result(formulation, choices, reading, f"{key}::output", "output")
    held = [(name, "update", reading) for name, reading in _updates(formulation)]
    held += [(n, "gradient", r) for n, r in zip(formulation.captured.grads, formulation.grads, strict=True)]
    place = {name: formulation.blocks.place(name) for name, _, _ in held}
    # As for nodes, the second block speaks for its kind.
    for name, op, reading in sorted(held, key=lambda item: (p := place[item[0]]) is None or p[1] != MIDDLE):
        decision = formulation.decisions[reading.reader]
        entry = _result(formulation, choices, reading, f"{_entry_name(formulation, decision, name)}::{op}", op)
        known = found.setdefault(entry.name, entry)
        if known.inputs[0].steps != entry.inputs[0].steps:
            own = f"{name}::{op}"
            found[own] = _result(formulation, choices, reading, own, op)
    return list(found.items())


def _updates(formulation: Formulation) -> list[tuple[str, Reading]]:
    """What buffers and inputs hold after the step, by their names."""
    captured = formulation.captured
    where = {s.name: n for n, s in captured.sources.items()}
    readers = {(r.reader, r.node): r for r in formulation.readings}
    found = ((name, readers.get((formulation.of[where[name]], node))) for name, node in captured.mutations.items())
    return [(name, reading) for name, reading in found if reading is not None]


def _result(formulation: Formulation, choices: Sequence[int], reading: Reading, name: str, op: str) -> Node:
    edge = _edge(formulation, choices, reading)
    rule = LATE if op == "gradient" and formulation.accumulation.late else ""
    return Node(name=name, op=op, outputs=(edge.layout,), inputs=(edge,), rule=rule, time_s=0.0, count=1)


def _edge(formulation: Formulation, choices: Sequence[int], reading: Reading) -> Edge:
    source, reader = formulation.decisions[reading.source], formulation.decisions[reading.reader]
    table = source.tables[reading.output]
    assert table is not None
    start = source.strategies[choices[reading.source]].outs[reading.output]
    end = reader.strategies[choices[reading.reader]].ins[reading.at]
    assert start is not None
    if start not in table.index or end not in table.index:
        value = values_of(reading.of)[reading.output]
        assert value is not None
        table = formulation.transitions.table(value.shape, value.element_size(), extremes=True)
    steps: tuple[str, ...] = ()
    time = 0.0
    if reading.via is not None:
        middle = formulation.decisions[reading.via].strategies[choices[reading.via]].outs[0]
        assert middle is not None
        steps, time, start = table.way(start, middle), table.time(start, middle), middle
    steps, time = steps + table.way(start, end), time + table.time(start, end)
    name = _entry_name(formulation, source, formulation.captured.names[reading.of])
    return Edge(source=name, output=reading.output, layout=end, steps=steps, time_s=time)


def _predicted(formulation: Formulation, timeline: Timeline, solution: Solution, limit: int | None) -> Predicted:
    choices, prices = solution.choices, formulation.prices
    parts: dict[str, float] = dict.fromkeys(FAMILIES, 0.0)
    for index, decision in enumerate(formulation.decisions):
        seconds = float(decision.seconds[choices[index]]) * decision.weight
        parts[family_of(decision.node) if decision.kind == "op" and decision.node is not None else "update"] += seconds
    optimizer = parts["update"]
    compute = sum(parts.values()) - optimizer
    rest = solution.objective_s - compute - optimizer
    parts["collective"] = rest if rest > 1e-12 * solution.objective_s else 0.0
    parts["host"] = prices.step_s
    hidden = sum(float(matrix[choices[i], choices[j]]) for (i, j), matrix in formulation.hidden.items())
    return Predicted(
        step_time_s=solution.objective_s + prices.step_s,
        step_time_interval_s=interval_s(parts, dict(prices.uncertainties)),
        compute_s=compute,
        exposed_communication_s=parts["collective"],
        hidden_communication_s=hidden,
        optimizer_s=optimizer,
        recompute_s=min(compute, _recompute_s(formulation, choices)),
        memory=timeline.memory(choices, limit),
    )


def _recompute_s(formulation: Formulation, choices: Sequence[int]) -> float:
    """Seconds of the ops that compute a value of the forward again."""
    seconds = 0.0
    for node in computed_again(formulation.captured):
        index = formulation.of.get(node)
        if index is not None and op_name(node) != "getitem":
            share = formulation.blocks.share(formulation.captured.names[node])
            seconds += share * float(formulation.decisions[index].seconds[choices[index]])
    return seconds

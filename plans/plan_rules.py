"""What must hold in a plan beyond the types of its keys. The types are in `plan`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from .errors import RequestError
from .layouts import is_partial, shard_dim
from .stage_rules import PlanRuleError, check_stage_meshes
from .stamps import numbers_of, stamped_block
from .steps import parse_step

if TYPE_CHECKING:
    from .plan import Edge, Node, Plan, Tensor

__all__ = ["PlanRuleError", "check"]

_AXIS = re.compile(r"[A-Za-z_]\w{0,31}", re.ASCII)
_TANGENT = re.compile(r"(tangent|constant)\.\w{1,64}", re.ASCII)
_SLACK = 1e-6


def check(plan: Plan) -> None:
    """Raise PlanRuleError for the first rule that `plan` breaks."""
    _check_values(plan)
    _check_mesh(plan)
    _check_blocks(plan)
    _check_tensors(plan)
    _check_pipeline(plan)
    check_stage_meshes(plan, _check_sharding)
    _check_figures(plan)


def _check_sharding(plan: Plan) -> None:
    """What one mesh has: axes, tensors and nodes."""
    _check_axes(plan)
    _check_tensors(plan)


def _check_tensors(plan: Plan) -> None:
    for kind in ("parameters", "buffers", "inputs", "outputs"):
        tensors: tuple[Tensor, ...] = getattr(plan, kind)
        _check_names(plan, kind, [tensor.name for tensor in tensors])
        for index, tensor in enumerate(tensors):
            _check_tensor(plan, tensor, f"{kind}[{index}]", may_be_partial=kind == "outputs")
    _check_names(plan, "nodes", [node.name for node in plan.nodes])
    _check_nodes(plan)


def _check_values(plan: Plan) -> None:
    """Text is printable, so that no plan can play with a terminal, and numbers are finite."""
    for key, value in _leaves(plan, ""):
        if isinstance(value, str) and not value.isprintable():
            raise PlanRuleError(key, "hold printable characters only", ascii(value)[:200])
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanRuleError(key, "be a finite number", value)


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    fields = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        for name in fields:
            yield from _leaves(getattr(value, name), f"{at}.{name}" if at else name)
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{at}[{index}]")
    else:
        yield at, value


def _check_mesh(plan: Plan) -> None:
    _check_axes(plan)
    if plan.stage_meshes is not UNSET:
        return
    ranks = 1 if plan.pipeline is None else plan.pipeline.ranks
    if ranks * plan.mesh.size > plan.cluster.size:
        rule = f"have, times the pipeline's ranks, at most the cluster's {plan.cluster.size} devices"
        raise PlanRuleError("mesh.shape", rule, f"{ranks} x {plan.mesh} = {ranks * plan.mesh.size}")


def _check_axes(plan: Plan) -> None:
    for index, name in enumerate(plan.mesh.axis_names):
        if not _AXIS.fullmatch(name):
            raise PlanRuleError(f"mesh.axis_names[{index}]", "be a word of at most 32 letters", name)


def _check_pipeline(plan: Plan) -> None:
    if plan.pipeline is None:
        return
    try:
        plan.pipeline.check()
    except RequestError as error:
        raise PlanRuleError("pipeline", "be a pipeline that can run", str(error)) from None
    firsts = [stage.first for stage in plan.pipeline.stages]
    for index, first in enumerate(firsts):
        if first in firsts[:index] or not (_begins(plan, first) if first else index == 0):
            rule = "name an op or module of the plan, each once, the first stage none"
            raise PlanRuleError(f"pipeline.stages[{index}].first", rule, first)


def _begins(plan: Plan, first: str) -> bool:
    """Whether an op of the plan has this name or lies in the module of this path. Of one of several results of an op,
    which no entry stands for, only the module is known."""
    path, mark, op = first.partition("::")
    wanted = path if op.startswith("getitem.") else first
    names = {wanted}
    for stamp in plan.model.stamps():
        if stamp.number(f"{wanted}.") is not None:
            names.add(stamp.stamped(wanted if mark and wanted is first else f"{wanted}.").removesuffix("."))
    return any(node.name == n or node.name.startswith((f"{n}.", f"{n}::")) for n in names for node in plan.nodes)


def _check_blocks(plan: Plan) -> None:
    """Every kind stands for its own blocks, as many as it says."""
    seen: set[str] = set()
    taken: dict[str, list[range]] = defaultdict(list)
    for index, block in enumerate(plan.model.blocks):
        key = f"model.blocks[{index}]"
        path, _, mark = block.pattern.rpartition(".")
        numbers = range(block.count) if mark == "*" else numbers_of(mark)
        if block.pattern.count("*") + (numbers_of(mark) is not None) != 1 or block.pattern in seen:
            rule = "hold one '*', or end in the numbers that it stands for, as in 3-60 or 5-59/6, and be given once"
            raise PlanRuleError(f"{key}.pattern", rule, block.pattern)
        seen.add(block.pattern)
        if numbers is None:
            continue
        if len(numbers) != block.count:
            raise PlanRuleError(f"{key}.count", f"be {len(numbers)}, as many as {mark} says", block.count)
        if any(_meet(numbers, other) for other in taken[path]):
            raise PlanRuleError(f"{key}.pattern", "stand for no block that another one stands for", block.pattern)
        taken[path].append(numbers)


def _meet(a: range, b: range) -> bool:
    """Whether two ranges, neither empty, have a number in common."""
    shared = math.gcd(a.step, b.step)
    if (b.start - a.start) % shared:
        return False
    period = b.step // shared
    first = a.start + (b.start - a.start) // shared * pow(a.step // shared, -1, period) % period * a.step
    every = a.step * period
    low = max(a.start, b.start)
    return first + max(0, -(-(low - first) // every)) * every <= min(a[-1], b[-1])


def _check_names(plan: Plan, kind: str, names: list[str]) -> None:
    patterns = {block.pattern for block in plan.model.blocks}
    seen: set[str] = set()
    for index, name in enumerate(names):
        key = f"{kind}[{index}].name"
        if name in seen:
            raise PlanRuleError(key, f"be the only one of that name in '{kind}'", name)
        seen.add(name)
        if "*" in name and (name.count("*") > 1 or stamped_block(name, patterns) is None):
            raise PlanRuleError(key, "hold a '*' only as one of 'model.blocks' does", name)


def _check_tensor(plan: Plan, tensor: Tensor, at: str, *, may_be_partial: bool) -> None:
    _check_layout(plan, tensor.layout, f"{at}.layout")
    for placement in tensor.layout:
        dim = shard_dim(placement)
        if dim is not None and dim >= len(tensor.shape):
            rule = f"split only the {len(tensor.shape)} dims that the shape has"
            raise PlanRuleError(f"{at}.layout", rule, list(tensor.layout))
        if is_partial(placement) and not may_be_partial:
            raise PlanRuleError(f"{at}.layout", "hold no pending reduction", list(tensor.layout))


def _check_layout(plan: Plan, layout: tuple[str, ...], key: str) -> None:
    if len(layout) != plan.mesh.ndim:
        rule = f"have one placement for each of the {plan.mesh.ndim} mesh axes"
        raise PlanRuleError(key, rule, list(layout))


def _check_nodes(plan: Plan) -> None:
    tensors: Iterable[Tensor] = (*plan.parameters, *plan.buffers, *plan.inputs)
    outputs = {tensor.name: 1 for tensor in tensors} | {node.name: len(node.outputs) for node in plan.nodes}
    axes = set(plan.mesh.axis_names)
    for index, node in enumerate(plan.nodes):
        _check_node(plan, node, f"nodes[{index}]")
        for position, edge in enumerate(node.inputs):
            _check_edge(plan, edge, outputs, axes, f"nodes[{index}].inputs[{position}]")


def _check_node(plan: Plan, node: Node, at: str) -> None:
    for index, layout in enumerate(node.outputs):
        if layout is not None:
            _check_layout(plan, layout, f"{at}.outputs[{index}]")


def _check_edge(plan: Plan, edge: Edge, outputs: dict[str, int], axes: set[str], at: str) -> None:
    if edge.source not in outputs and not _TANGENT.fullmatch(edge.source):
        raise PlanRuleError(f"{at}.source", "name a node, parameter, buffer or input of the plan", edge.source)
    if edge.output >= outputs.get(edge.source, 1):
        raise PlanRuleError(f"{at}.output", f"be below the number of outputs of {edge.source}", edge.output)
    if edge.layout is not None:
        _check_layout(plan, edge.layout, f"{at}.layout")
    elif edge.steps:
        raise PlanRuleError(f"{at}.steps", "be empty where there is no layout", list(edge.steps))
    for index, text in enumerate(edge.steps):
        try:
            step = parse_step(text)
        except RequestError:
            raise PlanRuleError(f"{at}.steps[{index}]", "be a step such as 'all_gather(dp, 0)'", text) from None
        if step.axis not in axes:
            raise PlanRuleError(f"{at}.steps[{index}]", f"run along one of the axes {sorted(axes)}", text)


def _check_figures(plan: Plan) -> None:
    memory, solver, predicted = plan.predicted.memory, plan.solver, plan.predicted
    largest = max(memory.parameters_bytes, memory.optimizer_bytes)
    if memory.peak_bytes < largest:
        raise PlanRuleError("predicted.memory.peak_bytes", f"be at least {largest}, a part of it", memory.peak_bytes)
    if solver.bound_s > solver.objective_s * (1 + _SLACK) + 1e-12:
        raise PlanRuleError("solver.bound_s", f"be at most the objective {solver.objective_s}", solver.bound_s)
    if predicted.exposed_communication_s > predicted.step_time_s * (1 + _SLACK):
        rule = f"be at most the step time {predicted.step_time_s}"
        raise PlanRuleError("predicted.exposed_communication_s", rule, predicted.exposed_communication_s)
    low, high = predicted.step_time_interval_s or (predicted.step_time_s, predicted.step_time_s)
    if not low <= predicted.step_time_s * (1 + _SLACK) or not predicted.step_time_s <= high * (1 + _SLACK):
        rule = f"hold the step time {predicted.step_time_s}"
        raise PlanRuleError("predicted.step_time_interval_s", rule, predicted.step_time_interval_s)
    if predicted.recompute_s > predicted.compute_s * (1 + _SLACK):
        rule = f"be at most the compute {predicted.compute_s}, a part of which it is"
        raise PlanRuleError("predicted.recompute_s", rule, predicted.recompute_s)

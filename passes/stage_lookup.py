"""What a plan of the whole model says of the nodes of one stage."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from ..plans.errors import ReplayError
from ..plans.layouts import REPLICATE
from ..plans.plan import Crossing, Edge, Node, Plan
from .graph import tensor_args
from .lookup import PlanLookup
from .naming import op_name
from .stages import StageProgram, Value

__all__ = ["Crossings", "StageLookup"]


class StageLookup:
    """Finding the plan's nodes by name. Boundary values lie as their makers leave them, or would leave them on this
    stage's mesh; those that come from a stage of another sharding, as the plan lands them, from where their readers
    bring them on."""

    def __init__(self, plan: Plan, stage: StageProgram) -> None:
        self.whole, self.stage = PlanLookup(_seen(plan, stage.index)), stage
        self.ndim = self.whole.plan.mesh.ndim
        self.outputs = {at: index for index, at in stage.results.items()}
        self.crossings = Crossings(plan)
        stages = 1 if plan.pipeline is None else len(plan.pipeline.stages)
        here, places = stage.index, range(stages)
        self.landing = self._ways(stage.receives, here - 1, here, places)
        self.landing |= self._ways(stage.receives_gradient, here + 1, here, places)
        self.leaving = self._ways(stage.sends, here, here + 1, places)
        self.leaving |= self._ways(stage.sends_gradient, here, here - 1, places)
        self.readers = self._readers() if self.landing else {}

    def __call__(self, name: str) -> Node:
        """The node `name`; ReplayError when the plan has none."""
        found = self._found(name)
        landed = self.readers.get(name)
        if landed is None:
            return found
        edges = list(found.inputs)
        for at, way in landed.items():
            edges[at] = msgspec.structs.replace(edges[at], steps=(*way.landed_steps, *edges[at].steps))
        return msgspec.structs.replace(found, inputs=tuple(edges))

    def _ways(self, values: Iterable[str], start: int, end: int, stages: range) -> dict[str, Crossing]:
        """How `values` go from stage `start` to stage `end`, where these lie on different meshes."""
        if start not in stages or end not in stages or not self.crossings.between(start, end):
            return {}
        return {value: self.crossings(value, start, end) for value in values}

    def _readers(self) -> dict[str, dict[int, Crossing]]:
        """By the names of ops and results, which of their inputs are values that landed here."""
        captured, found = self.stage.captured, dict[str, dict[int, Crossing]]()
        for node in captured.ops():
            for at, value in enumerate(tensor_args(node)):
                if captured.names[value] in self.landing:
                    found.setdefault(captured.names[node], {})[at] = self.landing[captured.names[value]]
        ends = {f"output.{at}::output": node for at, node in enumerate(captured.outputs) if node is not None}
        ends |= {f"{name}::gradient": node for name, node in captured.grads.items()}
        ends |= {f"{name}::update": node for name, node in captured.mutations.items()}
        for name, node in ends.items():
            if captured.names[node] in self.landing:
                found[name] = {0: self.landing[captured.names[node]]}
        return found

    def _found(self, name: str) -> Node:
        stage = self.stage
        if name in stage.values:
            return self._tensor(name)
        kind, _, rest = name.partition(".")
        if kind == "output" and rest.endswith("::output"):
            at = int(rest.partition("::")[0])
            if at not in self.outputs:
                return self._end(stage.sends[at])
            return self.whole(f"output.{self.outputs[at]}::output")
        base, mark, end = name.rpartition("::")
        if mark and end == "gradient":
            if base in stage.values or base in stage.sends_gradient:
                return self._end(base)
            return self._gradient(base, name)
        return self.whole(name)

    def _tensor(self, name: str) -> Node:
        layout = self.landing[name].landed if name in self.landing else self._layout(name)
        return Node(name=name, op="tensor", outputs=(layout,), inputs=(), rule="", time_s=0.0, count=1)

    def _layout(self, name: str) -> tuple[str, ...] | None:
        if name.startswith("tangent."):
            return (REPLICATE,) * self.ndim
        maker, number = self.stage.values.get(name) or _maker(self.stage, name)
        return self.whole(maker).outputs[number]

    def _end(self, name: str) -> Node:
        """A result that leaves the stage: as it is, or as its way to another mesh wants it."""
        way = self.leaving.get(name)
        layout, steps = (self._layout(name), ()) if way is None else (way.sent, way.sent_steps)
        edge = Edge(source=name, layout=layout, steps=steps, time_s=0.0)
        return Node(name=name, op="send", outputs=(layout,), inputs=(edge,), rule="", time_s=0.0, count=1)

    def _gradient(self, parameter: str, name: str) -> Node:
        """The end of a gradient; a part of a sum is brought along the way that its sum would have taken."""
        whole = self.whole(name)
        way = self.stage.sums.get(parameter, ())
        if not way:
            return whole
        steps = [step for add, at in way for step in self.whole(add).inputs[at].steps]
        edge = whole.inputs[0]
        joined = Edge(
            source=edge.source, output=edge.output, layout=edge.layout, steps=(*steps, *edge.steps), time_s=edge.time_s
        )
        return Node(name=name, op=whole.op, outputs=whole.outputs, inputs=(joined,), rule="", time_s=0.0, count=1)


class Crossings:
    """A plan's ways between stages on different meshes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        known = () if plan.stage_meshes is UNSET else plan.stage_meshes.crossings
        self._ways = {(one.value, one.before, one.after): one for one in known}

    def between(self, start: int, end: int) -> tuple[int, int] | None:
        """The shardings of two stages, None where these are the same."""
        if self.plan.pipeline is None:
            return None
        stages = self.plan.pipeline.stages
        before, after = (self.plan.sharding_of(stages[at].rank) for at in (start, end))
        return None if before == after else (before, after)

    def __call__(self, value: str, start: int, end: int) -> Crossing:
        """The way of a value from stage `start` to stage `end`; ReplayError where the plan has none."""
        pair = self.between(start, end)
        assert pair is not None
        if (value, *pair) in self._ways:
            return self._ways[value, *pair]
        raise ReplayError(
            f"'plan' must say how every value goes from one mesh to another, got no way for {value} from stage {start} "
            f"to stage {end}; plan this model again"
        )


def _seen(plan: Plan, stage: int) -> Plan:
    return plan if plan.pipeline is None else plan.on_rank(plan.pipeline.stages[stage].rank)


def _maker(stage: StageProgram, name: str) -> Value:
    """The op behind a value that the stage itself makes."""
    node = next(n for n, known in stage.captured.names.items() if known == name)
    if op_name(node) == "getitem":
        return stage.captured.names[node.args[0]], node.args[1]  # type: ignore[index,return-value]
    return name, 0

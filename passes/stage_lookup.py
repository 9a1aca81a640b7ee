"""What a plan of the whole model says of the nodes of one stage."""

from __future__ import annotations

from ..plans.layouts import REPLICATE
from ..plans.plan import Edge, Node, Plan
from .lookup import PlanLookup
from .naming import op_name
from .stages import StageProgram, Value

__all__ = ["StageLookup"]


class StageLookup:
    """Finding the plan's nodes by name: boundary values lie as their makers leave them."""

    def __init__(self, plan: Plan, stage: StageProgram) -> None:
        self.whole, self.stage, self.ndim = PlanLookup(plan), stage, plan.mesh.ndim
        self.outputs = {at: index for index, at in stage.results.items()}

    def __call__(self, name: str) -> Node:
        """The node `name`; ReplayError when the plan has none."""
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
        return Node(name=name, op="tensor", outputs=(self._layout(name),), inputs=(), rule="", time_s=0.0, count=1)

    def _layout(self, name: str) -> tuple[str, ...] | None:
        if name.startswith("tangent."):
            return (REPLICATE,) * self.ndim
        maker, number = self.stage.values.get(name) or _maker(self.stage, name)
        return self.whole(maker).outputs[number]

    def _end(self, name: str) -> Node:
        """A result that leaves the stage as it is."""
        layout = self._layout(name)
        edge = Edge(source=name, layout=layout, steps=(), time_s=0.0)
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


def _maker(stage: StageProgram, name: str) -> Value:
    """The op behind a value that the stage itself makes."""
    node = next(n for n, known in stage.captured.names.items() if known == name)
    if op_name(node) == "getitem":
        return stage.captured.names[node.args[0]], node.args[1]  # type: ignore[index,return-value]
    return name, 0

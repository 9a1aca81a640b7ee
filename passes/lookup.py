"""Finding in a plan what it says of a node: by the node's own name first, then by the name that stands for its
kind of block."""

from __future__ import annotations

from ..plans.errors import ReplayError
from ..plans.layouts import Layout
from ..plans.plan import Node, Plan

__all__ = ["PlanLookup"]


class PlanLookup:
    """The nodes and tensors of a plan by name."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._nodes = {node.name: node for node in plan.nodes}
        self._tensors = {t.name: t.layout for t in (*plan.parameters, *plan.buffers, *plan.inputs)}
        self._stamps = plan.model.stamps()

    def __call__(self, name: str) -> Node:
        """The plan's node `name`; a parameter, buffer or input counts as one without inputs.

        Raises ReplayError when there is none.
        """
        for key in self._keys(name):
            if key in self._nodes:
                return self._nodes[key]
        layout = self.layout(name)
        if layout is None:
            raise ReplayError(
                f"'plan' must say how to run every op of the model, got no entry for {name}; plan this model again"
            )
        return Node(name=name, op="tensor", outputs=(layout,), inputs=(), rule="", time_s=0.0, count=1)

    def layout(self, name: str) -> Layout | None:
        """Where the parameter, buffer or input `name` lies; tangents and constants are whole on every device."""
        for key in self._keys(name):
            if key in self._tensors:
                return self._tensors[key]
        return ("R",) * self.plan.mesh.ndim if name.startswith(("tangent.", "constant.")) else None

    def _keys(self, name: str) -> list[str]:
        return [name, *(stamp.stamped(name) for stamp in self._stamps if stamp.number(name) is not None)]

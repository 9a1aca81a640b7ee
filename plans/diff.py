"""What changes from one plan to another, in the model's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from .words import bytes_words, layout_words, seconds_words, shape_words

if TYPE_CHECKING:
    from .plan import Node, Plan, Tensor

__all__ = ["Change", "Diff", "Figure", "compare"]

_SHOWN = 60


class Change(Struct, frozen=True, kw_only=True):
    """One thing that differs; `before` or `after` is None where only the other plan has it."""

    kind: str
    name: str
    what: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.kind} {self.name}: only in the second plan"
        if self.after is None:
            return f"{self.kind} {self.name}: only in the first plan"
        return f"{self.kind} {self.name}: {self.what}: {self.before} -> {self.after}"


class Figure(Struct, frozen=True, kw_only=True):
    """One predicted figure of both plans; its unit is in its name."""

    name: str
    before: float | None
    after: float | None


class Diff(Struct, frozen=True, kw_only=True):
    """All that differs between two plans, and the predicted figures of both."""

    changes: tuple[Change, ...]
    figures: tuple[Figure, ...]

    @property
    def same(self) -> bool:
        """Whether no choice differs; figures may."""
        return not self.changes

    def __str__(self) -> str:
        lines = [str(change) for change in self.changes[:_SHOWN]] or ["The two plans make the same choices."]
        if len(self.changes) > _SHOWN:
            lines.append(f"... and {len(self.changes) - _SHOWN} more changes")
        width = max(len(figure.name) for figure in self.figures) if self.figures else 0
        lines += ["", f"{'predicted':<{width}}  {'first':>12}  {'second':>12}"]
        for figure in self.figures:
            before, after = (_figure_words(figure.name, value) for value in (figure.before, figure.after))
            lines.append(f"{figure.name:<{width}}  {before:>12}  {after:>12}{_ratio(figure)}")
        return "\n".join(lines)


def compare(first: Plan, second: Plan) -> Diff:
    """What changes from `first` to `second`."""
    changes = [*_whole(first, second)]
    for kind, field in (("parameter", "parameters"), ("buffer", "buffers"), ("input", "inputs"), ("output", "outputs")):
        changes += _tensors(kind, first, second, getattr(first, field), getattr(second, field))
    changes += _nodes(first, second)
    return Diff(changes=tuple(changes), figures=tuple(_figures(first, second)))


def _whole(first: Plan, second: Plan) -> Iterator[Change]:
    def mesh(plan: Plan) -> str:
        return f"{plan.mesh} ({', '.join(plan.mesh.axis_names)})"

    pairs = [
        ("model", first.model.name, "structure", first.model.digest[:12], second.model.digest[:12]),
        ("cluster", first.cluster.label, "devices", str(first.cluster), str(second.cluster)),
        ("mesh", str(first.mesh), "axes", mesh(first), mesh(second)),
        ("calibration", "costs", "source", first.calibration, second.calibration),
    ]
    for field in first.options.__struct_fields__:
        before, after = getattr(first.options, field), getattr(second.options, field)
        pairs.append(("option", field, "value", _value(before), _value(after)))
    for kind, name, what, before, after in pairs:
        if before != after:
            yield Change(kind=kind, name=name, what=what, before=before, after=after)


def _value(value: object) -> str:
    return "; ".join(str(part) for part in value) or "none" if isinstance(value, tuple) else str(value)


def _tensors(kind: str, first: Plan, second: Plan, old: Sequence[Tensor], new: Sequence[Tensor]) -> Iterator[Change]:
    left = {tensor.name: tensor for tensor in old}
    right = {tensor.name: tensor for tensor in new}
    for name in dict.fromkeys((*left, *right)):
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            yield _only(kind, name, a is None)
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            before, after = (f"{t.dtype} {shape_words(t.shape)}" for t in (a, b))
            yield Change(kind=kind, name=name, what="shape", before=before, after=after)
        before, after = layout_words(a.layout, first.mesh), layout_words(b.layout, second.mesh)
        if before != after:
            yield Change(kind=kind, name=name, what="layout", before=before, after=after)


def _only(kind: str, name: str, in_second: bool) -> Change:
    before, after = (None, "present") if in_second else ("present", None)
    return Change(kind=kind, name=name, what="presence", before=before, after=after)


def _nodes(first: Plan, second: Plan) -> Iterator[Change]:
    left = {node.name: node for node in first.nodes}
    right = {node.name: node for node in second.nodes}
    for name in dict.fromkeys((*left, *right)):
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            yield _only("node", name, a is None)
            continue
        for (what, before), (_, after) in zip(_node_words(a, first), _node_words(b, second), strict=True):
            if before != after:
                yield Change(kind="node", name=name, what=what, before=before, after=after)


def _node_words(node: Node, plan: Plan) -> Iterator[tuple[str, str]]:
    yield "output layout", "; ".join(layout_words(layout, plan.mesh) for layout in node.outputs) or "none"
    yield "rule", node.rule or "none"
    moves = [f"{edge.source}: {' then '.join(edge.steps)}" for edge in node.inputs if edge.steps]
    yield "communication", "; ".join(moves) or "none"


def _figures(first: Plan, second: Plan) -> Iterator[Figure]:
    a, b = first.predicted, second.predicted
    for name in a.__struct_fields__:
        if name != "memory":
            yield Figure(name=name, before=getattr(a, name), after=getattr(b, name))
    for name in a.memory.__struct_fields__:
        yield Figure(name=f"memory.{name}", before=getattr(a.memory, name), after=getattr(b.memory, name))
    yield Figure(name="gap", before=first.solver.gap, after=second.solver.gap)


def _figure_words(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name.endswith("_bytes"):
        return bytes_words(value)
    return seconds_words(value) if name.endswith("_s") else f"{100 * value:.2f}%"


def _ratio(figure: Figure) -> str:
    if not figure.before or figure.after is None or figure.name == "gap":
        return ""
    return f"  {100 * (figure.after / figure.before - 1):+.1f}%"

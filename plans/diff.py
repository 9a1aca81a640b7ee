"""What changes from one plan to another, in the model's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from .layouts import Layout, local_shape
from .pipeline_diff import pipeline_rows
from .words import bytes_words, dtype_bytes, layout_words, moved_words, pattern_of, seconds_words, shape_words

if TYPE_CHECKING:
    from .plan import Node, Plan, Tensor

__all__ = ["Change", "Diff", "Figure", "compare", "device_bytes"]

_SHOWN = 60
_NAMES = 3


class Change(Struct, frozen=True, kw_only=True):
    """One thing that differs; `before` or `after` is None where only the other plan has it.

    words      the change in short, where it can be said shorter than by `before` and `after`
    count      how many tensors or ops of the model it is about
    seconds    what they take longer, all of them together, hidden communication included; None where it is not known
    bytes      what they take more on a device, all of them together
    """

    kind: str
    name: str
    what: str
    before: str | None
    after: str | None
    words: str = ""
    count: int = 1
    seconds: float | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}{f' ({self.count})' if self.count > 1 else ''}: {self.said}"

    @property
    def said(self) -> str:
        """The change without its name."""
        if self.before is None:
            return "only in the second plan"
        if self.after is None:
            return "only in the first plan"
        return self.words or f"{self.what}: {self.before} -> {self.after}"


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

    def lines(self, most: int = _SHOWN) -> list[str]:
        """The changes in at most `most` lines and one: equal ones together, ops by what they cost."""
        groups: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            groups.setdefault((change.kind, change.said), []).append(change)
        ordered = sorted(groups.values(), key=_rank)
        found = [_group_words(group) for group in ordered[:most]] or ["The two plans make the same choices."]
        rest = [change for group in ordered[most:] for change in group]
        return found + ([f"... and {len(rest)} more changes{_cost(rest)}"] if rest else [])

    def __str__(self) -> str:
        lines = self.lines()
        width = max(len(figure.name) for figure in self.figures) if self.figures else 0
        lines += ["", f"{'predicted':<{width}}  {'first':>12}  {'second':>12}"]
        for figure in self.figures:
            before, after = (_figure_words(figure.name, value) for value in (figure.before, figure.after))
            lines.append(f"{figure.name:<{width}}  {before:>12}  {after:>12}{_ratio(figure)}")
        return "\n".join(lines)


def _rank(group: list[Change]) -> tuple[int, float]:
    """Tensors and options as they come, then ops by the seconds that they change."""
    node = group[0].kind == "node"
    return (1, -abs(sum(change.seconds or 0.0 for change in group))) if node else (0, 0.0)


def _group_words(group: list[Change]) -> str:
    names: dict[str, int] = {}
    for change in group:
        path, mark, op = change.name.partition("::")
        key = f"{pattern_of(path)}{mark}{op}"
        names[key] = names.get(key, 0) + change.count
    shown = [f"{name} ({count})" if count > 1 else name for name, count in list(names.items())[:_NAMES]]
    if len(group) == 1:
        shown = [f"{group[0].name} ({group[0].count})" if group[0].count > 1 else group[0].name]
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{group[0].kind} {', '.join(shown)}{more}: {group[0].said}{_cost(group)}"


def _cost(group: Iterable[Change]) -> str:
    parts: list[str] = []
    seconds = sum(change.seconds or 0.0 for change in group)
    size = sum(change.bytes or 0 for change in group)
    for value, words in ((seconds, seconds_words), (size, bytes_words)):
        if abs(value) >= 1e-9:
            parts.append(f"{'-' if value < 0 else '+'}{words(abs(value))}")
    return f" ({', '.join(parts)})" if parts else ""


def compare(first: Plan, second: Plan) -> Diff:
    """What changes from `first` to `second`."""
    changes = [*_whole(first, second)]
    for kind, name, what, before, after in pipeline_rows(first.pipeline, second.pipeline):
        changes.append(Change(kind=kind, name=name, what=what, before=before, after=after))
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
            words = moved_words(a.layout, b.layout, first.mesh) if first.mesh == second.mesh else ""
            more = device_bytes(b, second) - device_bytes(a, first)
            yield Change(
                kind=kind,
                name=name,
                what="layout",
                before=before,
                after=after,
                words=words,
                count=second.copies(name),
                bytes=more,
            )


def device_bytes(tensor: Tensor, plan: Plan) -> int:
    """Bytes on the fullest device of a tensor and of all that its name stands for."""
    size = plan.copies(tensor.name) * dtype_bytes(tensor.dtype)
    for length in local_shape(tensor.shape, tensor.layout, plan.mesh.shape, (0,) * plan.mesh.ndim):
        size *= length
    return size


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
        compute = b.time_s * b.count - a.time_s * a.count
        moves = _moves_s(b) - _moves_s(a)
        words = _moved(a.outputs, b.outputs, first, second)
        for what, before, after in _node_changes(a, b, first, second):
            yield Change(
                kind="node",
                name=name,
                what=what,
                before=before,
                after=after,
                words=words if what == "output layout" else "",
                count=b.count,
                seconds={"output layout": compute, "communication": moves}.get(what),
            )


def _moved(old: Sequence[Layout | None], new: Sequence[Layout | None], first: Plan, second: Plan) -> str:
    if first.mesh != second.mesh or len(old) != len(new):
        return ""
    pairs = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    if not pairs or any(a is None or b is None for a, b in pairs):
        return ""
    words = dict.fromkeys(moved_words(a, b, first.mesh) for a, b in pairs if a is not None and b is not None)
    return f"made {'; '.join(words)}"


def _moves_s(node: Node) -> float:
    """Seconds of all that is sent to a node, for all that it stands for."""
    return node.count * sum(edge.time_s for edge in node.inputs)


def _node_changes(a: Node, b: Node, first: Plan, second: Plan) -> Iterator[tuple[str, str, str]]:
    """What differs between two nodes of one name, before and after."""
    before, after = ("; ".join(layout_words(x, p.mesh) for x in n.outputs) for n, p in ((a, first), (b, second)))
    # Where results of the step lie is said of the tensors themselves.
    if before != after and a.op not in ("output", "update", "gradient"):
        yield "output layout", before or "none", after or "none"
    if a.rule != b.rule:
        yield "rule", a.rule or "none", b.rule or "none"
    old, new = ([f"{e.source}: {' then '.join(e.steps)}" for e in node.inputs if e.steps] for node in (a, b))
    if old != new:
        gone, come = [move for move in old if move not in new], [move for move in new if move not in old]
        yield "communication", "; ".join(gone or old) or "none", "; ".join(come or new) or "none"


def _figures(first: Plan, second: Plan) -> Iterator[Figure]:
    a, b = first.predicted, second.predicted
    for name in a.__struct_fields__:
        if name not in ("memory", "step_time_interval_s"):
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

"""What a plan records of a tensor or an op: where it lies, what it costs, what is sent for it. No model is needed."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, Struct

from .diff import device_bytes
from .errors import RequestError
from .pipelines import Pipeline, Stage
from .plan import Node, Plan, StageMeshes, Tensor
from .words import bytes_words, layout_words, pattern_of, pipeline_words, seconds_words, shape_words

__all__ = ["PIPELINE_KINDS", "Fact", "Move", "facts_of"]

# Kinds of facts that are about a plan's pipeline: the names `pipeline` and `pipeline.stages.N`.
PIPELINE_KINDS = ("pipeline", "stage")

_MOVES = 6


class Move(Struct, frozen=True, kw_only=True):
    """A tensor on its way: `steps` bring it from `source` to `reader`, `count` times, in `seconds` all together."""

    source: str
    reader: str
    steps: tuple[str, ...]
    count: int
    seconds: float


class Fact(Struct, frozen=True, kw_only=True):
    """What the plan says of one name. `name` is the plan's: with `*` where it stands for `copies` equal things.

    layout           in words
    device_bytes     on the fullest device, all copies together; None for an op
    seconds          of computing, all copies together; None for a tensor
    moves            communication from it and to it
    constraints      those of the request that speak of it
    """

    kind: str
    name: str
    asked: str
    copies: int
    shape: str
    layout: str
    device_bytes: int | None
    seconds: float | None
    moves: tuple[Move, ...]
    constraints: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """For a person to read."""
        among = f", {self.asked} among them" if self.copies > 1 and "*" not in self.asked else ""
        yield f"{self.kind} {self.name}{f' ({self.copies}{among})' if self.copies > 1 else ''}"
        size = "" if self.device_bytes is None else f"; {bytes_words(self.device_bytes)} on a device"
        took = "" if not self.seconds else f"; {seconds_words(self.seconds)} of compute"
        yield f"  {f'{self.shape}: ' if self.shape else ''}{self.layout}{size}{took}"
        for move in sorted(self.moves, key=lambda move: -move.seconds)[:_MOVES]:
            end = f"to {move.reader}" if move.source == self.name else f"from {move.source}"
            times = f" {move.count} times," if move.count > 1 else ""
            yield f"  {end}: {' then '.join(move.steps)},{times} {seconds_words(move.seconds)}"
        if len(self.moves) > _MOVES:
            yield f"  ... and {len(self.moves) - _MOVES} more ways"
        yield from (f"  constraint: {constraint}" for constraint in self.constraints)


def facts_of(plan: Plan, names: Sequence[str]) -> tuple[Fact, ...]:
    """What `plan` says of everything that `names` mean. A name may hold `*`, and a numbered name also means the
    entry of the kind of block that stands for it. RequestError for a name that means nothing.

    Where pipeline ranks have different meshes, all meshes are told of, and how values go from one to another."""
    if plan.stage_meshes is UNSET:
        return _on_one_mesh(plan, names)
    found: list[Fact] = []
    for number, sharding in enumerate((None, *plan.stage_meshes.shardings)):
        rank = next(r for r in range(len(plan.meshes())) if plan.sharding_of(r) == number)
        facts = _on_one_mesh(plan.on_rank(rank), names)
        told = [fact for fact in facts if sharding is None or fact.kind not in ("pipeline", "stage")]
        mesh = plan.meshes()[rank]
        found += [
            fact if fact.kind in ("pipeline", "stage") else msgspec.structs.replace(fact, kind=f"{fact.kind} on {mesh}")
            for fact in told
        ]
    return (*found, *_crossing_facts(plan, plan.stage_meshes, names))


def _crossing_facts(plan: Plan, meshes: StageMeshes, names: Sequence[str]) -> Iterator[Fact]:
    """How the values that `names` mean go from one mesh to another."""
    shapes = [plan.mesh, *(one.mesh for one in meshes.shardings)]
    for one in meshes.crossings:
        asked = next((name for name in names if one.value == name or fnmatch.fnmatchcase(one.value, name)), None)
        if asked is None:
            continue
        before, after = shapes[one.before], shapes[one.after]
        words = f"leaves {before} {layout_words(one.sent, before)}, lands on {after} {layout_words(one.landed, after)}"
        ways = ((one.sent_steps, "leaves"), (one.landed_steps, "lands"))
        moves = tuple(
            Move(source=one.value, reader=reader, steps=steps, count=1, seconds=one.time_s)
            for steps, reader in ways
            if steps
        )
        yield Fact(
            kind="crossing", name=one.value, asked=asked, copies=1, shape="", layout=words, device_bytes=None,
            seconds=one.time_s, moves=moves, constraints=(),
        )  # fmt: skip


def _on_one_mesh(plan: Plan, names: Sequence[str]) -> tuple[Fact, ...]:
    entries: dict[str, tuple[str, Tensor | Node]] = {}
    for kind, field in (("parameter", plan.parameters), ("buffer", plan.buffers), ("input", plan.inputs)):
        entries |= {tensor.name: (kind, tensor) for tensor in field}
    entries |= {tensor.name: ("output", tensor) for tensor in plan.outputs if tensor.name not in entries}
    entries |= {node.name: ("op", node) for node in plan.nodes if node.op not in ("output", "update", "gradient")}
    found: dict[str, Fact] = {}
    for asked in names:
        meant = [name for name in entries if name == asked or fnmatch.fnmatchcase(name, asked)]
        meant = meant or [name for name in entries if _stands_for(plan, name, asked)]
        if not meant and "*" in asked:
            meant = [name for name in entries if "*" in name and fnmatch.fnmatchcase(name, pattern_of(asked))]
        if not meant and plan.pipeline is not None:
            piped = [fact for fact in _pipeline_facts(plan.pipeline, asked) if fnmatch.fnmatchcase(fact.name, asked)]
            if piped:
                found |= {fact.name: fact for fact in piped}
                continue
        if not meant:
            near = difflib.get_close_matches(asked, entries, n=3, cutoff=0.3)
            raise RequestError(
                f"'name' must be a parameter, buffer, input, output or op of the plan, or match some, got {asked!r}; "
                f"near: {', '.join(near) or 'nothing'}; `meshwright show --json` lists them"
            )
        for name in meant:
            found.setdefault(name, _fact(plan, *entries[name], asked))
    return tuple(found.values())


def _pipeline_facts(pipeline: Pipeline, asked: str) -> Iterator[Fact]:
    """What the plan says of its pipeline and of each stage, by their keys in the plan."""
    whole = sum(_stage_s(stage) for stage in pipeline.stages) * pipeline.microbatches
    priced = all(stage.cost is not None for stage in pipeline.stages)
    yield _piped("pipeline", "pipeline", asked, pipeline_words(pipeline), None, whole if priced else None)
    for number, stage in enumerate(pipeline.stages):
        words = f"begins with {stage.first or 'the first op'}, on rank {stage.rank}"
        held = None if stage.cost is None else stage.cost.held_bytes
        seconds = None if stage.cost is None else _stage_s(stage) * pipeline.microbatches
        yield _piped("stage", f"pipeline.stages.{number}", asked, words, held, seconds)


def _stage_s(stage: Stage) -> float:
    cost = stage.cost
    return 0.0 if cost is None else cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s


def _piped(kind: str, name: str, asked: str, words: str, held: int | None, seconds: float | None) -> Fact:
    return Fact(
        kind=kind, name=name, asked=asked, copies=1, shape="", layout=words, device_bytes=held, seconds=seconds,
        moves=(), constraints=(),
    )  # fmt: skip


def _stands_for(plan: Plan, entry: str, asked: str) -> bool:
    """Whether the entry, of a kind of block, is that of the numbered name `asked`."""
    return any(s.number(asked) is not None and s.stamped(asked) == entry for s in plan.model.stamps())


def _fact(plan: Plan, kind: str, entry: Tensor | Node, asked: str) -> Fact:
    if isinstance(entry, Node):
        layouts = "; ".join(layout_words(layout, plan.mesh) for layout in entry.outputs) or "nothing"
        shape, layout, size = "", f"makes {layouts}", None
        copies, seconds = entry.count, entry.time_s * entry.count
    else:
        copies, seconds, size = plan.copies(entry.name), None, device_bytes(entry, plan)
        shape, layout = f"{shape_words(entry.shape)} {entry.dtype}", layout_words(entry.layout, plan.mesh)
    return Fact(
        kind=kind,
        name=entry.name,
        asked=asked,
        copies=copies,
        shape=shape,
        layout=layout,
        device_bytes=size,
        seconds=seconds,
        moves=tuple(_moves(plan, entry.name)),
        constraints=tuple(c for c in plan.options.constraints if _speaks(c, entry.name, asked)),
    )


def _speaks(constraint: str, name: str, asked: str) -> bool:
    about = constraint.partition("=")[0].removesuffix("!").strip()
    return any(fnmatch.fnmatchcase(one, about) for one in (name, asked)) or about == name


def _moves(plan: Plan, name: str) -> Iterator[Move]:
    for node in plan.nodes:
        own = node.name in (name, f"{name}::gradient", f"{name}::update")
        for edge in node.inputs:
            if edge.steps and (own or edge.source == name):
                count = max(node.count, plan.copies(node.name))
                yield Move(
                    source=edge.source, reader=node.name, steps=edge.steps, count=count, seconds=edge.time_s * count
                )

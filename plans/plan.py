"""The plan: every choice about how a model is split over a cluster, and what that is predicted to cost.

A plan is a pure value. `plan_file` reads and writes it, `plan_rules` says which values make sense, `summary` and `diff`
show it. Names are module paths; one with `*` or `3-60` for the number of a block stands for all blocks of that kind
(see `Model.blocks`).
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from . import plan_file
from .clusters import Cluster
from .errors import RequestError
from .meshes import Mesh
from .pipelines import Pipeline
from .stamps import Stamp, stamped_block

if TYPE_CHECKING:
    from .diff import Diff
    from .likeness import Likeness

__all__ = [
    "Block",
    "Crossing",
    "DynamicDim",
    "Edge",
    "Memory",
    "Model",
    "Node",
    "Options",
    "Origin",
    "Plan",
    "Predicted",
    "Sharding",
    "Solver",
    "StageMeshes",
    "Tensor",
    "plan_schema",
]

Count = Annotated[int, Meta(ge=0, le=2**48)]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e15)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Text = Annotated[str, Meta(max_length=4096)]
Version = Annotated[str, Meta(min_length=1, max_length=64)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Dtype = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,31}$")]
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]
Placement = Annotated[str, Meta(pattern=r"^(R|S\(\d{1,2}\)|P\((sum|max|min)\))$")]
Layout = Annotated[tuple[Placement, ...], Meta(min_length=1, max_length=4)]
Step = Annotated[str, Meta(min_length=1, max_length=128)]


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    """What all parts of a plan have in common."""


class Block(_Record, frozen=True, kw_only=True):
    """One kind of repeated block: `pattern` is a module path that stands for `count` modules of a list, all of them
    (`layers.*`) or those of some numbers (`layers.3-60`, and `layers.5-59/6` for every sixth)."""

    pattern: Name
    count: Annotated[int, Meta(ge=1, le=2**20)]


class Origin(_Record, frozen=True, kw_only=True):
    """Where the command line got a model: the SPEC as it was typed and what was asked for beside it."""

    spec: Name
    global_batch: Annotated[int, Meta(ge=1, le=2**31)] | None
    seq_len: Annotated[int, Meta(ge=1, le=2**31)] | None
    layers: Annotated[int, Meta(ge=1, le=2**31)] | None


class Model(_Record, frozen=True, kw_only=True):
    """The model that a plan is for; `digest` is a sha256 of its structure, never of its weights.

    `origin` is None where a model was planned that no SPEC names."""

    name: Name
    digest: Digest
    parameters: Count
    parameter_bytes: Bytes
    blocks: Annotated[tuple[Block, ...], Meta(max_length=1024)]
    origin: Origin | None = None

    def stamps(self) -> tuple[Stamp, ...]:
        """The kinds of blocks as stamps."""
        found = (Stamp.parse(block.pattern, block.count) for block in self.blocks)
        return tuple(stamp for stamp in found if stamp is not None)


class Tensor(_Record, frozen=True, kw_only=True):
    """A parameter, buffer, input or output: its global shape, its dtype as torch names it, and where its pieces lie."""

    name: Name
    shape: Shape
    dtype: Dtype
    layout: Layout


class Edge(_Record, frozen=True, kw_only=True):
    """A tensor that a node reads: output number `output` of `source`, and the steps that bring it to `layout`.

    `source` names a node, a parameter, a buffer or an input. `layout` is None for what is not a tensor.
    `time_s` is the time of one use.
    """

    source: Name
    output: Annotated[int, Meta(ge=0, le=4096)] = 0
    layout: Layout | None
    steps: Annotated[tuple[Step, ...], Meta(max_length=64)]
    time_s: Seconds


class Node(_Record, frozen=True, kw_only=True):
    """An op of the program: module path, `::`, op and ordinal. `rule` names a special local lowering, or is empty."""

    name: Name
    op: Name
    outputs: Annotated[tuple[Layout | None, ...], Meta(max_length=4096)]
    inputs: Annotated[tuple[Edge, ...], Meta(max_length=4096)]
    rule: Text
    time_s: Seconds
    count: Annotated[int, Meta(ge=1, le=2**32)]


class DynamicDim(_Record, frozen=True, kw_only=True):
    """A dim of an input whose size may change between training steps, from `smallest` to `largest` (None: without end)
    by multiples of `step`. Dims of one `symbol` change together."""

    input: Name
    dim: Annotated[int, Meta(ge=0, le=63)]
    symbol: Name
    smallest: Count
    largest: Count | None
    step: Annotated[int, Meta(ge=1, le=2**48)]

    def takes(self, size: int) -> bool:
        """Whether the dim may have `size` elements."""
        return (
            self.smallest <= size
            and (self.largest is None or size <= self.largest)
            and (size - self.smallest) % self.step == 0
        )

    @property
    def span(self) -> str:
        """The range in words."""
        return f"{self.symbol} from {self.smallest}" + (
            (f" to {self.largest}" if self.largest is not None else " up")
            + (f" by {self.step}" if self.step > 1 else "")
        )


class Options(_Record, frozen=True, kw_only=True):
    """What the user asked for; `recompute` says what the backward computes again instead of reading it from memory,
    `prefetch` that parameters are gathered one gather ahead of their use; `recipe` is empty where none was named."""

    optimizer: Text
    compiled: bool
    recompute: Literal["none", "pointwise", "block"]
    prefetch: bool
    memory_limit_bytes: Bytes | None
    constraints: Annotated[tuple[Text, ...], Meta(max_length=4096)]
    recipe: Text
    seed: Annotated[int, Meta(ge=0, le=2**62)] | None
    replicate: Annotated[tuple[Text, ...], Meta(max_length=4096)] = ()
    dynamic: Annotated[tuple[DynamicDim, ...], Meta(max_length=4096)] = ()


class Memory(_Record, frozen=True, kw_only=True):
    """Predicted bytes on the fullest device; `peak_bytes` is the largest sum that is alive at one moment.

    The other figures are what it consists of: `activations` the values of ops, `gathered` parameters brought together
    for their use, `communication` the copies and buffers of all other moves, `other` inputs, buffers, what the
    optimizer's step makes and what ops take for themselves.
    """

    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    gathered_bytes: Bytes
    communication_bytes: Bytes
    other_bytes: Bytes
    peak_bytes: Bytes
    limit_bytes: Bytes | None


class Predicted(_Record, frozen=True, kw_only=True):
    """What one training step is predicted to take; `recompute_s` is the part of `compute_s` that the backward spends
    on computing forward values again. `step_time_interval_s` is what the uncertainties of the prices allow."""

    step_time_s: Seconds
    step_time_interval_s: tuple[Seconds, Seconds] | None = None
    compute_s: Seconds
    exposed_communication_s: Seconds
    hidden_communication_s: Seconds
    optimizer_s: Seconds
    recompute_s: Seconds = 0.0
    memory: Memory


class Solver(_Record, frozen=True, kw_only=True):
    """How the choices were found; `gap` is how far, relatively, the plan may be from the best one."""

    status: Annotated[str, Meta(pattern="^[a-z][a-z0-9 _-]{0,63}$")]
    objective_s: Seconds
    bound_s: Seconds
    gap: Annotated[float, Meta(ge=0.0, le=1e15)]
    seconds: Seconds
    choices: Count


class Sharding(_Record, frozen=True, kw_only=True):
    """How the stages of some pipeline `ranks` lie on a mesh of their own; keys as those of the plan, for the whole
    model."""

    ranks: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**16)], ...], Meta(min_length=1, max_length=2**16)]
    mesh: Mesh
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[Node, ...]


class Crossing(_Record, frozen=True, kw_only=True):
    """How a value, or a gradient, goes from a stage of sharding `before` to one of sharding `after` (0: the plan's own,
    n: number n - 1 of `StageMeshes.shardings`).

    From where its op leaves it, `sent_steps` on the mesh of `before` lead to `sent`, in which no sum is pending; every
    device of `after` is given its piece of `landed`, and `landed_steps` lead to where that op would have left it on
    the mesh of `after`. `time_s` is of one micro-batch."""

    value: Name
    before: Count
    after: Count
    sent: Layout
    sent_steps: Annotated[tuple[Step, ...], Meta(max_length=64)] = ()
    landed: Layout
    landed_steps: Annotated[tuple[Step, ...], Meta(max_length=64)] = ()
    time_s: Seconds = 0.0


class StageMeshes(_Record, frozen=True, kw_only=True):
    """The meshes of pipeline ranks that are not the plan's own, and what crosses between stages on different ones."""

    shardings: Annotated[tuple[Sharding, ...], Meta(min_length=1, max_length=64)]
    crossings: Annotated[tuple[Crossing, ...], Meta(max_length=2**16)]


class Plan(_Record, frozen=True, kw_only=True):
    """How one model is split over one cluster. Version 2 is a plan whose pipeline ranks have different meshes
    (`stage_meshes`); all others are of version 1, without that key."""

    format: Literal["meshwright-plan"] = "meshwright-plan"
    version: Literal[1, 2] = 1
    meshwright_version: Version
    torch_version: Version
    model: Model
    cluster: Cluster
    mesh: Mesh
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    options: Options
    predicted: Predicted
    solver: Solver
    calibration: Text
    pipeline: Pipeline | None = None
    stage_meshes: StageMeshes | UnsetType = UNSET

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in the file at `path`; PlanError when it is not a sound plan of this version."""
        data = plan_file.read(path)
        return plan_file.decode(cls, data, where=os.fspath(path))

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """The plan in `data`; PlanError when it is not a sound plan of this version."""
        return plan_file.decode(cls, data, where="the bytes given")

    def to_bytes(self) -> bytes:
        """The plan as canonical JSON; PlanError when a value makes no sense."""
        return plan_file.encode(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path`: all of it or, when anything fails, nothing."""
        plan_file.write(path, self.to_bytes())

    def digest(self) -> str:
        """A sha256 of the plan's file, `solver.seconds` left out: how long a search took is not what it found."""
        solver = msgspec.structs.replace(self.solver, seconds=0.0)
        return hashlib.sha256(msgspec.structs.replace(self, solver=solver).to_bytes()).hexdigest()

    def sharding_of(self, rank: int) -> int:
        """Which sharding the stages of pipeline rank `rank` have: 0 for the plan's own (see `Crossing`)."""
        if self.stage_meshes is UNSET:
            return 0
        return next((n for n, one in enumerate(self.stage_meshes.shardings, 1) if rank in one.ranks), 0)

    def on_rank(self, rank: int) -> Plan:
        """The plan as the stages of pipeline rank `rank` see it: all on their mesh."""
        number = self.sharding_of(rank)
        if self.stage_meshes is UNSET:
            return self
        if number == 0:
            return msgspec.structs.replace(self, version=1, stage_meshes=UNSET)
        one = self.stage_meshes.shardings[number - 1]
        return msgspec.structs.replace(
            self, version=1, stage_meshes=UNSET, mesh=one.mesh, parameters=one.parameters, buffers=one.buffers,
            inputs=one.inputs, outputs=one.outputs, nodes=one.nodes,
        )  # fmt: skip

    def meshes(self) -> tuple[Mesh, ...]:
        """The mesh of each pipeline rank; of a plan without a pipeline, its mesh."""
        ranks = range(1 if self.pipeline is None else self.pipeline.ranks)
        shardings = () if self.stage_meshes is UNSET else self.stage_meshes.shardings
        return tuple((self, *shardings)[self.sharding_of(rank)].mesh for rank in ranks)

    def one_mesh(self, what: str) -> None:
        """RequestError where pipeline ranks have different meshes: a plan must have one to be `what`."""
        meshes = dict.fromkeys(map(str, self.meshes()))
        if self.stage_meshes is not UNSET:
            raise RequestError(
                f"'plan' must have one mesh on all its pipeline ranks to be {what}, got {' and '.join(meshes)}; plan "
                "with mesh= one mesh for all ranks"
            )

    def processes(self, rank: int) -> range:
        """The processes that play pipeline rank `rank`, in the order of its mesh."""
        sizes = [mesh.size for mesh in self.meshes()]
        start = sum(sizes[:rank])
        return range(start, start + sizes[rank])

    def copies(self, name: str) -> int:
        """How many tensors or ops `name` stands for: the count of its kind of block, else 1."""
        counts = {block.pattern: block.count for block in self.model.blocks}
        return counts.get(stamped_block(name, counts) or "", 1)

    def summary(self, width: int = 100) -> str:
        """The plan as tables for a person to read."""
        from .summary import summarise

        if not isinstance(width, int) or isinstance(width, bool) or width < 1:
            raise RequestError(f"'width' must be a whole number of characters, got {width!r:.80}; leave it out for 100")
        return summarise(self, width)

    def recipe(self) -> Likeness:
        """The recipe that this plan is like, and what it does in another way."""
        from .likeness import likeness

        return likeness(self)

    def diff(self, other: Plan) -> Diff:
        """What changes from this plan to `other`."""
        from .diff import compare

        if not isinstance(other, Plan):
            raise RequestError(f"'other' must be a Plan, got {other!r:.80}; read a plan file with Plan.load")
        return compare(self, other)


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of the plan file: every key is required (`stage_meshes` by version 2), no other is allowed."""
    schema = msgspec.json.schema(Plan)
    for name, part in schema["$defs"].items():
        # Version 1 has none: see `Plan`.
        part["required"] = [key for key in part["properties"] if (name, key) != ("Plan", "stage_meshes")]
        part["additionalProperties"] = False
        for rule in part["properties"].values():
            rule.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

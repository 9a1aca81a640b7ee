"""How values cross from the mesh of one stage to another one: in which layout they leave, in which they land, and what
that takes.

Sums that are pending are reduced before, along the way that is cheapest; after, a device may be given less than it
needs, where gathering the rest from its own mesh is faster than sending every device a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec
import numpy as np
import torch

from ...passes.lookup import PlanLookup
from ...passes.stages import StageProgram, Value
from ...plans.errors import RequestError
from ...plans.handover import handed_over
from ...plans.layouts import REPLICATE, Layout, is_partial
from ...plans.meshes import Mesh
from ...plans.plan import Crossing, Plan, Sharding, StageMeshes
from ..sharding.transitions import Transitions, TransitionTable

__all__ = ["Side", "Way", "crossings_of", "least", "most_bytes", "on_meshes"]

Choose = Callable[[Sequence["Way"]], "Way"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of a value, and the seconds of it that the giving stage takes, the link, and the taking stage; it may be
    a `gradient`, which goes down."""

    crossing: Crossing
    gradient: bool
    leaving_s: float
    sending_s: float
    landing_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One sharding of a model: its number (see `plans.Crossing`), the plan as its stages see it, and what steps on its
    mesh take."""

    number: int
    plan: Plan
    transitions: Transitions
    lookup: PlanLookup = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup", PlanLookup(self.plan))

    def left(self, maker: Value) -> Layout:
        """The layout in which the op behind a value leaves it."""
        layout = self.lookup(maker[0]).outputs[maker[1]]
        assert layout is not None
        return layout

    def table(self, value: torch.Tensor) -> TransitionTable:
        """All layouts of a value on this mesh."""
        return self.transitions.table(value.shape, value.element_size(), extremes=True)


def least(ways: Sequence[Way]) -> Way:
    """The way that takes least."""
    return min(ways, key=lambda way: way.crossing.time_s)


def crossings_of(
    programs: Sequence[StageProgram],
    sides: Sequence[Side],
    send_s: Callable[[float], float],
    choose: Choose = least,
) -> tuple[Way, ...]:
    """The ways of all values between stages that follow each other on different meshes: stage s is `programs[s]` and
    lies as `sides[s]` says.

    send_s   seconds of handing so many bytes from one device to one of another pipeline rank

    RequestError, which names the value, where no way leads to how its op would leave it.
    """
    found: dict[tuple[str, int, int], Way] = {}
    for here, there in itertools.pairwise(range(len(programs))):
        ways = ((here, there, programs[here].sends), (there, here, programs[there].sends_gradient))
        for start, end, names in ways:
            before, after = sides[start], sides[end]
            if before.number == after.number:
                continue
            for name, maker, value in _values(programs[start], programs[end], names):
                key = (name, before.number, after.number)
                if key not in found:
                    options = _ways(name, maker, value, before, after, send_s, gradient=end < start)
                    found[key] = choose(list(options))
    return tuple(found.values())


def on_meshes(sides: Sequence[Plan], numbers: Sequence[int], crossings: Sequence[Crossing]) -> Plan:
    """The plan whose pipeline rank r lies as `sides[numbers[r]]`, a plan on one mesh, says; what is predicted is that
    of the first of `sides`, which some rank must have."""
    shardings = tuple(
        Sharding(
            ranks=tuple(rank for rank, at in enumerate(numbers) if at == number),
            mesh=one.mesh, parameters=one.parameters, buffers=one.buffers, inputs=one.inputs, outputs=one.outputs,
            nodes=one.nodes,
        )
        for number, one in enumerate(sides[1:], 1)
    )  # fmt: skip
    meshes = StageMeshes(shardings=shardings, crossings=tuple(crossings))
    return msgspec.structs.replace(sides[0], version=2, stage_meshes=meshes)


def _values(
    giver: StageProgram, taker: StageProgram, names: Iterable[str]
) -> Iterator[tuple[str, Value, torch.Tensor]]:
    """What crosses: its name, the op behind it, and it itself as a fake tensor."""
    nodes = {name: node for node, name in taker.captured.names.items()}
    for name in names:
        yield name, taker.values.get(name) or giver.values[name], nodes[name].meta["val"]


def _ways(
    name: str,
    maker: Value,
    value: torch.Tensor,
    before: Side,
    after: Side,
    send_s: Callable[[float], float],
    *,
    gradient: bool,
) -> Iterator[Way]:
    left, wanted = before.left(maker), after.left(maker)
    here, there = before.table(value), after.table(value)
    size, dtype = value.element_size(), str(value.dtype).removeprefix("torch.")
    any_way = False
    for sent, landed in itertools.product(_sent(left, here), _landed(wanted, there)):
        leaving, landing = here.time(left, sent), there.time(landed, wanted)
        if not np.isfinite(leaving + landing):
            continue
        sending = send_s(
            most_bytes(tuple(value.shape), dtype, size, (sent, before.plan.mesh), (landed, after.plan.mesh))
        )
        any_way = True
        crossing = Crossing(
            value=name,
            before=before.number,
            after=after.number,
            sent=sent,
            sent_steps=here.way(left, sent),
            landed=landed,
            landed_steps=there.way(landed, wanted),
            time_s=leaving + sending + landing,
        )
        yield Way(crossing=crossing, gradient=gradient, leaving_s=leaving, sending_s=sending, landing_s=landing)
    if not any_way:
        raise RequestError(
            f"'mesh' must be one for which every value can cross between stages, got no way for {name} from "
            f"{','.join(left)} on {before.plan.mesh} to {','.join(wanted)} on {after.plan.mesh}; cut the model "
            "elsewhere or give both stages one mesh"
        )


def most_bytes(
    shape: tuple[int, ...], dtype: str, itemsize: int, before: tuple[Layout, Mesh], after: tuple[Layout, Mesh]
) -> float:
    """The most bytes that one device gives or is given of a tensor that goes from one layout to the other."""
    given: dict[int, int] = {}
    taken: dict[int, int] = {}
    for one in handed_over(shape, dtype, before, after):
        size = itemsize * prod(length for _, length in one.box)
        given[one.giver] = given.get(one.giver, 0) + size
        taken[one.taker] = taken.get(one.taker, 0) + size
    return float(max((*given.values(), *taken.values()), default=0))


def _sent(left: Layout, table: TransitionTable) -> Iterator[Layout]:
    """The layouts in which a value may leave: as it is, but for sums, which are whole or split."""
    for layout in table.layouts:
        if not any(is_partial(p) for p in layout) and all(
            a == b or is_partial(a) for a, b in zip(left, layout, strict=True)
        ):
            yield layout


def _landed(wanted: Layout, table: TransitionTable) -> Iterator[Layout]:
    """The layouts in which a value may land: as it is wanted, or split further along axes on which it would be whole;
    a sum is whole."""
    for layout in table.layouts:
        if not any(is_partial(p) for p in layout) and all(
            a == b or a == REPLICATE or (is_partial(a) and b == REPLICATE) for a, b in zip(wanted, layout, strict=True)
        ):
            yield layout

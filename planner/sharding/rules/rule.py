"""A rule, and the small language that most of them are written in.

A rule says: along one mesh axis, inputs placed like this give outputs placed like that, every device running the op on
its own pieces. Most ops are described by *links*: dims of the outputs and inputs that run together, so that splitting
all of them by one axis splits the op. A link that no output has is a contraction: its outputs are partial sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

from ....plans.layouts import PARTIAL, REPLICATE, Placement, shard

__all__ = ["Link", "Rule", "RuleFunction", "from_links", "replicated"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Placements along one axis, one per output and one per tensor input; None for an output that is absent.

    `local` names the local program when it is not simply the op on local pieces (passes/lowerings.py).
    `even` marks rules that hold only where every split dim is divisible by the devices that split it; `filled` those
    that hold only where each device has elements of it.
    """

    outs: tuple[Placement | None, ...]
    ins: tuple[Placement, ...]
    local: str = ""
    even: bool = False
    filled: bool = False


RuleFunction = Callable[[fx.Node], list[Rule]]
# Dim of each output, then of each input; None where the tensor does not have the link.
Link = tuple[Sequence["int | None"], Sequence["int | None"]]


def replicated(outputs: int, inputs: int, present: Sequence[bool] | None = None) -> Rule:
    """The rule that always holds."""
    outs = tuple(REPLICATE if present is None or present[i] else None for i in range(outputs))
    return Rule(outs, (REPLICATE,) * inputs)


def from_links(
    links: Sequence[Link], present: Sequence[bool], inputs: int, *, even: bool = False, filled: bool = False
) -> list[Rule]:
    """Rules of an op described by links, the replicated one first. `present[i]` says whether output i is a tensor."""
    rules = [replicated(len(present), inputs, present)]
    for out_dims, in_dims in links:
        contraction = all(d is None for d in out_dims)
        outs = []
        for here, dim in zip(present, out_dims, strict=True):
            outs.append(None if not here else shard(dim) if dim is not None else PARTIAL if contraction else REPLICATE)
        ins = tuple(REPLICATE if d is None else shard(d) for d in in_dims)
        rules.append(Rule(tuple(outs), ins, even=even, filled=filled))
    return rules

"""Regions that a user wrote for pieces: functions given to torch.distributed.tensor.experimental.local_map.

While a model is captured, such a call becomes one node, and its derivative another; they run in the placements that the
user gave, or in one of several alternatives (`any_of`). A rank then runs the user's function on its own pieces; the
derivative runs it again and differentiates. Without a capture the function runs on what it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..plans.errors import CaptureError
from ..plans.layouts import PARTIAL, REPLICATE, Layout, is_partial, shard
from . import _torch
from .trees import Tree, flatten, flatten_call

__all__ = ["Alternative", "Region", "any_of", "attach_regions", "kept_regions"]

_WAY_OUT = "give local_map a placement per mesh axis for every tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to run a region: the function, and placements of its results, its tensors and their gradients."""

    function: Callable[..., Any]
    outs: tuple[Layout, ...]
    ins: tuple[Layout, ...]
    grads: tuple[Layout, ...]


@dataclass(frozen=True, kw_only=True)
class Region:
    """A call: its alternatives and how the function's arguments are built from its tensors."""

    alternatives: tuple[Alternative, ...]
    constants: tuple[tuple[str, Any], ...]
    tree: Tree

    @property
    def key(self) -> tuple:
        """Equal for calls that do the same."""
        return self.alternatives, self.tree.names, tuple((k, repr(v)) for k, v in self.constants)

    def run(self, at: int, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results of alternative `at` on tensors or pieces."""
        args, kwargs = self.tree.build(list(xs))
        return flatten(self.alternatives[at].function(*args, **kwargs), what="output")[0]

    def differentiate(self, at: int, xs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the tensors that can have one, by running alternative `at` again."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_(_real(x)) for x in xs]
            outs = self.run(at, given)
            flows = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
            leaves = [x for x in given if _real(x)]
            found = torch.autograd.grad([o for o, _ in flows], leaves, [g for _, g in flows], allow_unused=True)
        return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(leaves, found, strict=True)]


_CAPTURED: ContextVar[list[Region] | None] = ContextVar("regions of the running capture", default=None)


def any_of(*regions: Callable[..., Any]) -> Callable[..., Any]:
    """A region with alternatives: functions that torch's local_map made, which compute the same on whole tensors.

    The planner chooses among their placements; without a plan the first one runs. CaptureError for another function.
    """
    found = [_torch.local_map_arguments(region) for region in regions]
    if not found or any(given is None for given in found):
        raise CaptureError(f"'any_of' must be given functions made by local_map, got {regions!r}")

    @functools.wraps(found[0][0])  # type: ignore[index]
    def run(*args: Any, **kwargs: Any) -> Any:
        if _CAPTURED.get() is None:
            return regions[0](*args, **kwargs)
        return _kept([given for given in found if given is not None], args, kwargs)

    return run


@contextmanager
def kept_regions(known: Sequence[Region] = ()) -> Iterator[list[Region]]:
    """Keep regions as single nodes while this is entered; the list, with those that are `known`, fills with them."""
    found = list(known)
    token = _CAPTURED.set(found)
    try:
        with _torch.local_maps_go_to(lambda given, args, kwargs: _kept([given], args, kwargs)):
            yield found
    finally:
        _CAPTURED.reset(token)


def attach_regions(graph: fx.Graph, regions: Sequence[Region]) -> None:
    """Let the nodes of regions know them."""
    for node in graph.nodes:
        if node.target in _OPS:
            node.meta["region"] = regions[node.args[-1]]


def _kept(given: Sequence[tuple], args: tuple, kwargs: dict[str, Any]) -> Any:
    regions = _CAPTURED.get()
    assert regions is not None
    tensors, tree = flatten_call(args, kwargs)
    with torch.no_grad():
        outs, result = flatten(given[0][0](*args, **kwargs), what="output")
    alternatives = tuple(_alternative(one, args, kwargs, len(tensors), len(outs)) for one in given)
    region = Region(alternatives=alternatives, constants=tree.constants, tree=tree)
    number = next((i for i, known in enumerate(regions) if known.key == region.key), len(regions))
    if number == len(regions):
        regions.append(region)
    return result.build(list(_Region.apply(number, *tensors)))


def _alternative(given: tuple, args: tuple, kwargs: dict[str, Any], tensors: int, outs: int) -> Alternative:
    function, out_placements, in_placements, grad_placements = given[:4]
    if in_placements is None or out_placements is None:
        raise CaptureError(f"'local_map' must say how tensors lie, got None; {_WAY_OUT}")
    leaves = _torch.tree_flatten(args)[0]
    if len(in_placements) != len(leaves) or _torch.tree_flatten(kwargs)[0]:
        raise CaptureError(
            f"'local_map' must have a placement for each of {len(leaves)} positional inputs and no others, got "
            f"{len(in_placements)} and the keywords {list(kwargs)}; {_WAY_OUT}"
        )
    ins = tuple(_layout(p) for p, leaf in zip(in_placements, leaves, strict=True) if isinstance(leaf, torch.Tensor))
    several = isinstance(out_placements, tuple) and not all(isinstance(p, Placement) for p in out_placements)
    results = tuple(_layout(p) for p in (out_placements if several else (out_placements,)) if p is not None)
    if len(results) != outs or len(ins) != tensors:
        raise CaptureError(f"'local_map' must place each of {outs} results, got {out_placements!r}; {_WAY_OUT}")
    if grad_placements is None:
        grads = tuple(_gradient(layout, (*ins, *results)) for layout in ins)
    else:
        pairs = zip(grad_placements, leaves, strict=True)
        grads = tuple(_layout(p) for p, leaf in pairs if isinstance(leaf, torch.Tensor))
    return Alternative(function=function, outs=results, ins=ins, grads=grads)


def _gradient(layout: Layout, all_of: Sequence[Layout]) -> Layout:
    """Where the gradient of an input lies: of one that is whole where others are split, each device has a term."""
    found = []
    for axis, placement in enumerate(layout):
        split = any(other[axis] != REPLICATE for other in all_of)
        whole = REPLICATE if is_partial(placement) or not split else PARTIAL
        found.append(placement if placement not in (REPLICATE, PARTIAL) else whole)
    return tuple(found)


def _layout(placements: Sequence[Placement] | None) -> Layout:
    if placements is None:
        raise CaptureError(f"'local_map' must say how every tensor lies, got None for one; {_WAY_OUT}")
    texts = []
    for placement in placements:
        if isinstance(placement, Partial) and placement.reduce_op in ("sum", "max", "min"):
            texts.append(f"P({placement.reduce_op})")
        elif type(placement) is Shard:
            texts.append(shard(placement.dim))
        elif isinstance(placement, Replicate):
            texts.append(REPLICATE)
        else:
            raise CaptureError(f"'local_map' must use Shard, Replicate and Partial, got {placement!r}; {_WAY_OUT}")
    return tuple(texts)


def _real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Region(torch.autograd.Function):
    """A region as one op and its derivative as another."""

    @staticmethod
    def forward(ctx: Any, number: int, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.number = number
        ctx.save_for_backward(*xs)
        return tuple(region(list(xs), number))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        xs = ctx.saved_tensors
        found = iter(region_backward(list(xs), list(grads), ctx.number))
        return (None, *(next(found) if _real(x) else None for x in xs))


@torch.library.custom_op("meshwright::region", mutates_args=())
def region(xs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Region `number` of the running capture."""
    raise NotImplementedError("a region runs as part of a plan only")


@torch.library.custom_op("meshwright::region_backward", mutates_args=())
def region_backward(xs: list[torch.Tensor], grads: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Gradients of region `number`: of its real tensors, in order."""
    raise NotImplementedError("a region runs as part of a plan only")


@region.register_fake
def _(xs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    regions = _CAPTURED.get()
    assert regions is not None
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in regions[number].run(0, xs)]


@region_backward.register_fake
def _(xs: list[torch.Tensor], grads: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs if _real(x)]


_OPS = (torch.ops.meshwright.region.default, torch.ops.meshwright.region_backward.default)

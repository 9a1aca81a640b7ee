"""Dynamic dims: a plan for inputs of one size that runs inputs of any size within a range.

What is dynamic is declared as for torch.export, by the names of forward's parameters: {"x": {0: Dim("batch", max=64)}}.
The model is captured at other sizes of the ranges, too. Its ops must be the same there, and a strategy is kept only
where it holds at every one of those sizes: a view that regroups dims, say, is split only if it is at an odd size.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..passes.graph import Captured
from ..passes.lookup import PlanLookup
from ..passes.naming import op_name
from ..passes.trees import flatten_call
from ..plans.errors import CaptureError, ReplayError, RequestError
from ..plans.plan import DynamicDim, Plan
from . import _torch
from .sharding.own_rules import OpRule, attach_rules
from .sharding.strategies import Strategies, Strategy

__all__ = ["Dims", "at_planned_sizes", "attach", "call_at", "check_layouts", "dynamic_dims"]

# A dim of one element is broadcast and not split: no range starts below.
_LEAST = 2
_FORM = 'for example dynamic={"x": {0: torch.export.Dim("batch", min=2, max=64)}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The declared dims of a call, and the calls at other sizes that stand for all that may come."""

    dims: tuple[DynamicDim, ...]
    calls: tuple[tuple[tuple, dict[str, Any]], ...]


def dynamic_dims(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: object) -> Dims:
    """What `dynamic` declares of the call of `model`; RequestError when it is no declaration for it.

    `dynamic` may also be what a plan records. A dim is a torch.export.Dim (or twice one, or Dim.AUTO), a name, or
    (min, max); dims of one name have one size.
    """
    tensors, tree = flatten_call(args, kwargs)
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(tree.names, tensors, strict=True)}
    if isinstance(dynamic, tuple) and all(isinstance(d, DynamicDim) for d in dynamic):
        found: tuple[DynamicDim, ...] = dynamic
    else:
        found = () if dynamic is None else tuple(_declared(_by_path(model, args, kwargs, dynamic), shapes))
    for dim in found:
        size = shapes[dim.input][dim.dim]
        if not dim.takes(size):
            raise RequestError(
                f"'dynamic' must hold the size that is planned, got {size} for dim {dim.dim} of {dim.input}, declared "
                f"{dim.span}; widen the range or plan another size"
            )
    calls = [call_at(tensors, tree, sizes) for sizes in _other_sizes(found, shapes)]
    return Dims(dims=found, calls=tuple(calls))


def _by_path(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: object) -> dict[str, Any]:
    """Declarations by the path of the argument in a call: args.0, kwargs.mask."""
    if isinstance(dynamic, (tuple, list)):
        dynamic = dict(zip([f"args.{i}" for i in range(len(args))], dynamic, strict=False))
    if not isinstance(dynamic, Mapping):
        raise RequestError(f"'dynamic' must be a dict by parameter of forward, got {dynamic!r}; {_FORM}")
    positional = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    paths = {name: f"args.{i}" for i, name in enumerate(positional[: len(args)])}
    paths |= {name: f"kwargs.{name}" for name in kwargs}
    known = {*paths.values(), *(f"args.{i}" for i in range(len(args)))}
    found: dict[str, Any] = {}
    for name, declaration in dynamic.items():
        path = paths.get(name, name)
        if path not in known:
            raise RequestError(f"'dynamic' must name inputs of this call, got {name!r}; they are {', '.join(paths)}")
        found[path] = declaration
    return found


def _declared(tree: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[DynamicDim]:
    for path, declaration in tree.items():
        if declaration is None:
            continue
        inner = dict(enumerate(declaration)) if isinstance(declaration, (tuple, list)) else declaration
        if not isinstance(inner, Mapping):
            raise RequestError(f"'dynamic' must give dims of {path} as a dict, got {declaration!r}; {_FORM}")
        if path not in shapes:
            yield from _declared({f"{path}.{key}": value for key, value in inner.items()}, shapes)
            continue
        for dim, size in inner.items():
            if not isinstance(dim, int) or not -len(shapes[path]) <= dim < len(shapes[path]):
                raise RequestError(f"'dynamic' must name dims of {path} of shape {list(shapes[path])}, got {dim!r}")
            entry = _dim(path, dim % len(shapes[path]), size)
            if entry is not None:
                yield entry


def _dim(path: str, dim: int, size: Any) -> DynamicDim | None:
    symbol, least, most = f"{path}.{dim}", _LEAST, None
    factor, more = 1, 0
    found = _torch.export_dim(size)
    if size is None or found == "static":
        return None
    if isinstance(size, str):
        symbol = size
    elif isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(n, int) for n in size):
        least, most = size
    elif isinstance(found, tuple):
        symbol, least, most, function = found
        if function is not None:
            more = function(0)
            factor = function(1) - more
    elif found != "auto":
        raise RequestError(f"'dynamic' must give a Dim, a name or (min, max) for a dim, got {size!r}; {_FORM}")
    least = max(least, _LEAST)
    if most is not None and most < least:
        raise RequestError(
            f"'dynamic' must give ranges from {_LEAST} up, got {least} to {most} for dim {dim} of {path}"
        )
    return DynamicDim(
        input=path,
        dim=dim,
        symbol=symbol,
        smallest=least * factor + more,
        largest=None if most is None else most * factor + more,
        step=factor,
    )


def _other_sizes(dims: Sequence[DynamicDim], shapes: Mapping[str, tuple[int, ...]]) -> list[dict[tuple[str, int], int]]:
    """Sizes to look at beside the planned ones: odd and unlike any other size, and the smallest.

    Dims of one symbol are the same number of steps above their smallest sizes.
    """
    groups: dict[str, list[DynamicDim]] = {}
    for dim in dims:
        groups.setdefault(dim.symbol, []).append(dim)
    taken = {n for shape in shapes.values() for n in shape}
    odd: dict[tuple[str, int], int] = {}
    for group in groups.values():
        ends = [(d.largest - d.smallest) // d.step for d in group if d.largest is not None]
        steps = range(min([*ends, 4096]) + 1)
        good = (k for k in steps if all(_is_odd(d.smallest + k * d.step, d.step, taken) for d in group))
        chosen = next(good, steps[-1])
        odd |= {(d.input, d.dim): d.smallest + chosen * d.step for d in group}
        taken |= set(odd.values())
    least = {(d.input, d.dim): d.smallest for d in dims}
    now = {(d.input, d.dim): shapes[d.input][d.dim] for d in dims}
    return [sizes for i, sizes in enumerate((odd, least)) if dims and sizes != now and (i == 0 or sizes != odd)]


def _is_odd(size: int, step: int, taken: Collection[int]) -> bool:
    """Whether no axis splits `size` evenly, as far as a multiple of `step` allows, and no other dim has it."""
    times, rest = divmod(size, step)
    return size not in taken and (rest != 0 or _is_prime(times)) and times > 2


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in itertools.takewhile(lambda d: d * d <= n, itertools.count(2)))


def call_at(tensors: Sequence[torch.Tensor], tree: Any, sizes: Mapping[tuple[str, int], int]) -> tuple[tuple, dict]:
    """The call with the sizes replaced, on the meta device."""
    made = []
    for name, tensor in zip(tree.names, tensors, strict=True):
        shape = [sizes.get((name, d), n) for d, n in enumerate(tensor.shape)]
        made.append(torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad))
    args, kwargs = tree.build(made)
    return args, kwargs


def attach(captured: Captured, other: Captured) -> None:
    """Let every node of `captured` know its twin at the sizes of `other`. CaptureError when the ops differ."""
    twins = {name: node for node, name in other.names.items()}
    mine, theirs = list(captured.names.values()), set(twins)
    odd = next((n for n in mine if n not in theirs), None) or next((n for n in twins if n not in set(mine)), None)
    if odd is not None:
        shapes = {s.name: list(s.shape) for s in other.sources.values() if s.kind == "input"}
        raise CaptureError(
            f"'dynamic' must name dims whose size does not change which ops the model runs, got {odd} at some sizes "
            f"only, tried inputs {shapes}; leave that dim out or narrow its range"
        )
    for node, name in captured.names.items():
        node.meta["twins"] = (*node.meta.get("twins", ()), twins[name])


def at_planned_sizes(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """The call with inputs of the sizes that `plan` was made for; None when it has them already."""
    tensors, tree = flatten_call(args, kwargs)
    planned = {t.name: t.shape for t in plan.inputs}
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(tree.names, tensors, strict=True)}
    if any(len(planned.get(n, shape)) != len(shape) for n, shape in shapes.items()):
        return None
    other = {(n, d): size for n in shapes if n in planned for d, size in enumerate(planned[n]) if size != shapes[n][d]}
    return call_at(tensors, tree, other) if other else None


def check_layouts(plan: Plan, captured: Captured, *, rules: Sequence[OpRule] = ()) -> None:
    """ReplayError when `plan` was made for other sizes than those of `captured` and a layout does not hold at these."""
    lookup, catalogue = PlanLookup(plan), Strategies(plan.mesh, replicate=plan.options.replicate)
    attach_rules(captured, rules)
    whole = ("R",) * plan.mesh.ndim
    for node in captured.ops():
        if op_name(node) == "getitem":
            continue
        name = captured.names[node]
        entry = lookup(name)
        ins = tuple(edge.layout or whole for edge in entry.inputs)
        if {*ins, *(o or whole for o in entry.outputs)} == {whole}:
            continue
        if not catalogue.holds(node, Strategy(entry.outputs, ins, entry.rule), name):
            shapes = {s.name: list(s.shape) for s in captured.sources.values() if s.kind == "input"}
            raise ReplayError(
                f"'inputs' must have sizes at which the plan's layouts hold, got {shapes}, at which {name} cannot run "
                f"as {' '.join(','.join(o or ()) for o in entry.outputs)}; plan with these dims declared as dynamic"
            )

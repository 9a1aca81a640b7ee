"""Repeated blocks of a model: runs of modules in a list that are equal but for their number, and a model with fewer of
them.

Two blocks are of one kind when their classes, the shapes and dtypes of their parameters and buffers, and their plain
attributes agree; an attribute that counts the blocks (`layer_idx`) may differ. A run repeats one block, or a period of
several: five local layers and a global one. Capturing three repetitions of a deep run instead of all makes the time of
a capture independent of depth."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..plans.stamps import Stamp

__all__ = ["Run", "repeated_blocks", "with_fewer_blocks"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Within a longer list two equal neighbours are a run; a period of several blocks must come back this often.
_PERIODS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Repetitions of one block, or of several in turn: `stamps` has one entry for each block of a repetition."""

    stamps: tuple[Stamp, ...]

    @property
    def path(self) -> str:
        """The list that it lies in."""
        return self.stamps[0].path

    @property
    def count(self) -> int:
        """How often it is repeated."""
        return len(self.stamps[0].numbers)

    def place(self, name: str) -> tuple[int, Stamp] | None:
        """The repetition that `name` lies in, from 0 up, and the stamp of its block."""
        for stamp in self.stamps:
            number = stamp.number(name)
            if number is not None:
                return stamp.numbers.index(number), stamp
        return None

    def numbers(self, repetition: int) -> range:
        """The numbers of the blocks of one repetition."""
        first = self.stamps[0].numbers[repetition]
        return range(first, first + len(self.stamps))


def repeated_blocks(model: nn.Module) -> tuple[Run, ...]:
    """The outermost runs of blocks of one kind. A list of two or more blocks of one kind is one run; in other lists
    only blocks that hold modules count, so that `Linear, ReLU, Linear, ReLU` is no period."""
    owners = _owners(model)
    found: list[Run] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        if all(run.place(path) is None for run in found):
            found += _runs(path, list(module), owners)
    return tuple(found)


def with_fewer_blocks(model: nn.Module, runs: Iterable[Run]) -> nn.Module:
    """`model` in which only the first two and the last repetition of each run compute; weights are shared, not copied.

    The blocks in between give back what the block before them gave. They keep their places, numbers and attributes,
    so that a model that goes by these runs the others as it always does.
    """
    for run in runs:
        model = _replaced(model, run.path.split(".") if run.path else [], run)
    return model


def _replaced(module: nn.Module, path: list[str], run: Run) -> nn.Module:
    new = copy.copy(module)
    new._modules = dict(module._modules)
    if path:
        child = module._modules[path[0]]
        assert child is not None
        new._modules[path[0]] = _replaced(child, path[1:], run)
        return new
    latest = _Latest()
    blocks = list(module._modules.items())
    for repetition in range(run.count):
        kept = repetition in (0, 1, run.count - 1)
        for number in run.numbers(repetition):
            name, block = blocks[number]
            assert block is not None
            new._modules[name] = _turned(block, _Heard if kept else _Left, latest)
    return new


def _turned(block: nn.Module, behaviour: type[nn.Module], latest: _Latest) -> nn.Module:
    """A copy of `block` that is also a `_Heard` or a `_Left`."""
    new = copy.copy(block)
    if behaviour is _Left:
        held = {k: v for k, v in vars(block).items() if not isinstance(v, torch.Tensor)}
        new.__dict__ = held | {"_parameters": {}, "_buffers": {}, "_modules": {}}
    cls = type(block)
    new.__dict__["_meshwright_latest"] = latest
    new.__class__ = type(cls.__name__, (behaviour, cls), {"__module__": cls.__module__})
    return new


class _Latest:
    """What the blocks of a run that compute gave last."""

    __slots__ = ("output",)

    output: Any


class _Heard(nn.Module):
    """A block that computes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        self.__dict__["_meshwright_latest"].output = output
        return output


class _Left(nn.Module):
    """A block that another one stands for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_meshwright_latest"].output


def _owners(model: nn.Module) -> dict[int, int]:
    """How many names each parameter has."""
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _runs(path: str, blocks: Sequence[nn.Module], owners: Mapping[int, int]) -> list[Run]:
    kinds = _kinds(blocks, owners)
    if len(set(kinds)) == 1:
        return [Run(stamps=(Stamp.of(path, range(len(blocks)), whole=True),))]
    # What holds no module is no block here: it is of no other's kind.
    kinds = [
        kind if any(block.children()) else -1 - i for i, (kind, block) in enumerate(zip(kinds, blocks, strict=True))
    ]
    return [
        Run(
            stamps=tuple(
                Stamp.of(path, range(at, first + size, period), whole=False) for at in range(first, first + period)
            )
        )
        for first, size, period in _segments(kinds, 0, len(kinds))
    ]


def _segments(kinds: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """First block, number of blocks and period of the runs in a part of a list: the longest, then those beside it."""
    best = max(_candidates(kinds, start, end), key=lambda found: (found[1], -found[2], -found[0]), default=None)
    if best is not None:
        first, size, _ = best
        yield from _segments(kinds, start, first)
        yield best
        yield from _segments(kinds, first + size, end)


def _candidates(kinds: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    for period in range(1, (end - start) // 2 + 1):
        least = 2 if period == 1 else _PERIODS
        alike = 0  # how many blocks from `first` on equal the one a period later
        for first in range(end - period - 1, start - 1, -1):
            alike = alike + 1 if kinds[first] == kinds[first + period] else 0
            times = 1 + alike // period
            if times >= least:
                yield first, times * period, period


def _kinds(blocks: Sequence[nn.Module], owners: Mapping[int, int]) -> list[int]:
    """A number for the kind of each block; one that shares parameters or is there twice, or has none, is of its own."""
    known: dict[object, int] = {}
    times: dict[int, int] = {}
    for block in blocks:
        times[id(block)] = times.get(id(block), 0) + 1
    found = []
    for number, block in enumerate(blocks):
        kind = _kind(block)
        alone = not kind[1] or times[id(block)] > 1 or _shared(block, owners)
        found.append(known.setdefault(("alone", number) if alone else kind, number))
    return found


def _shared(block: nn.Module, owners: Mapping[int, int]) -> bool:
    return any(owners[id(p)] > 1 for _, p in block.named_parameters(remove_duplicate=False))


def _kind(block: nn.Module) -> tuple:
    """What makes a block's kind; attributes that count the blocks are there by name only."""
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False))
    )
    plain = []
    for name, module in block.named_modules():
        hooks = tuple(len(getattr(module, h)) for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
        values = {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN)}
        counted = {k for k, v in values.items() if type(v) is int and k.endswith(("idx", "id", "index"))}
        shown = tuple(sorted((k, "" if k in counted else repr(v)) for k, v in values.items()))
        plain.append((name, type(module), hooks, shown))
    return type(block), tensors, tuple(plain)

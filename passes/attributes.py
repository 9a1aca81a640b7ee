"""Plain attributes of modules that a model reads while it is captured: numbers, truth values, text, None. The program
has them as constants, so a running model must still have them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..plans.errors import CaptureError, ReplayError

__all__ = ["Attribute", "Modules", "Reads", "check_attributes", "reading"]

_PLAIN = (bool, int, float, complex, str, type(None))
# PyTorch's own; the mode is part of what a capture is found by.
_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """What the module at `path` had as `name` when it was captured."""

    path: str
    name: str
    value: Any

    @property
    def full(self) -> str:
        """The attribute as a user writes it after the model's name."""
        return f"{self.path}.{self.name}".lstrip(".")


@dataclass(slots=True, kw_only=True)
class Reads:
    """What was read first, and what was written before, by module path and attribute."""

    modules: dict[str, nn.Module]
    first: dict[tuple[str, str], Any] = field(default_factory=dict)
    written: set[tuple[str, str]] = field(default_factory=set)

    def attributes(self) -> tuple[Attribute, ...]:
        """The plain ones that the model only reads: a counter of its own is its own affair."""
        return tuple(
            Attribute(path=path, name=name, value=value)
            for (path, name), value in self.first.items()
            if type(value) in _PLAIN and (path, name) not in self.written and self._held(path, name, value)
        )

    def _held(self, path: str, name: str, value: Any) -> bool:
        """Whether it is an attribute of the module or of its class, and no property."""
        module = self.modules[path]
        found = [vars(module), *(vars(cls) for cls in type(module).__mro__)]
        return next((held[name] for held in found if name in held), self) is value

    def refuse_kept(self, given: Sequence[torch.Tensor]) -> None:
        """CaptureError where the model read what the call before left, and leaves a tensor to the next one."""
        known = {id(tensor) for tensor in given}
        for (path, name), before in self.first.items():
            now = vars(self.modules[path]).get(name)
            was_there = type(before) in _PLAIN or id(before) in known
            if was_there and now is not before and isinstance(now, torch.Tensor):
                full = Attribute(path=path, name=name, value=None).full
                raise CaptureError(
                    f"'model' must keep tensors between calls in buffers alone, got {full}, which a call reads and "
                    "then sets; register it as a buffer of its final shape, or give it to forward and return it. What "
                    "is made once and then kept is there if you call the model once before"
                )


@contextmanager
def reading(model: nn.Module) -> Iterator[Reads]:
    """Note what of the modules of `model` is read. While this lasts every module's attributes are looked up here."""
    reads = Reads(modules=dict(model.named_modules()))
    paths = {id(module): path for path, module in reads.modules.items()}
    look, before = object.__getattribute__, nn.Module.__setattr__

    def read(module: nn.Module, name: str) -> Any:
        value = look(module, name)
        if (type(value) in _PLAIN or isinstance(value, torch.Tensor)) and name not in _OWN and id(module) in paths:
            key = paths[id(module)], name
            if key not in reads.written:
                reads.first.setdefault(key, value)
        return value

    def write(module: nn.Module, name: str, value: Any) -> None:
        if id(module) in paths:
            reads.written.add((paths[id(module)], name))
        before(module, name, value)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    nn.Module.__setattr__ = write  # type: ignore[method-assign,assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = before  # type: ignore[method-assign]


class Modules:
    """The modules of a running model, looked for once: a step has no time to walk through them."""

    def __init__(self) -> None:
        self._found: dict[str, weakref.ref[nn.Module]] = {}

    def of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules by path."""
        found = {path: ref() for path, ref in self._found.items()}
        if found.get("") is not model or None in found.values():
            found = dict(model.named_modules())
            self._found = {path: weakref.ref(module) for path, module in found.items()}
        return found  # type: ignore[return-value]


def check_attributes(modules: Mapping[str, nn.Module], attributes: Sequence[Attribute]) -> None:
    """ReplayError at the first attribute that is no longer what the program was captured with."""
    for attribute in attributes:
        module = modules.get(attribute.path)
        now = vars(module).get(attribute.name, attribute.value) if module is not None else attribute.value
        was = attribute.value
        if now is not was and (type(now) is not type(was) or now != was):
            shown = repr(now) if type(now) in _PLAIN else f"a {type(now).__name__}"
            raise ReplayError(
                f"'{attribute.full}' must stay {was!r}, as it was when the model was captured, got {shown}; set it "
                "back, apply the plan to the model with the new value, or make it an argument of forward"
            )

"""What a captured program is found by: the inputs of the call, the modes of the modules, autocast; and in words what of
it has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..plans.errors import ReplayError
from .graph import Captured, Source
from .trees import Tree

__all__ = ["Signature", "check_held", "signature_of", "uncast"]

_EVAL = (
    "to validate while you train, make a plan of the model in eval mode, apply it to a model of its own and load the "
    "weights into that, or validate the plain model"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The call that a program was captured for.

    modes  whether each module is in training mode, by path
    casts  the dtypes that autocast makes, by kind of device
    """

    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    modes: tuple[tuple[str, bool], ...]
    casts: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def of(
        cls, tree: Tree, tensors: Sequence[Any], modules: Mapping[str, nn.Module], device: torch.device
    ) -> Signature:
        """That of a call; `tensors` may be sources. ReplayError where autocast is on for a device that captures do not
        see."""
        casts = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if torch.is_autocast_enabled(kind)
        )
        for kind, dtype in casts:
            if kind != "cpu":
                raise ReplayError(
                    f"'model' must be called without torch.autocast on {kind}, got {dtype}; the program is captured on "
                    "fake CPU tensors and has the dtypes of the plan: convert the model, or cast in forward"
                )
        return cls(
            names=tree.names,
            constants=tree.constants,
            tensors=tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors),
            modes=tuple((path, module.training) for path, module in modules.items()),
            casts=casts,
        )

    def changed(self, before: Signature) -> str:
        """What differs from `before`, and the way out, in words."""
        return "; ".join(self._differences(before)) or "nothing that its signature shows"

    def _differences(self, before: Signature) -> Iterator[str]:
        if self.names != before.names:
            yield f"inputs {', '.join(self.names) or 'none'} (planned with {', '.join(before.names) or 'none'})"
            return
        was = dict(before.constants)
        for name, value in self.constants:
            if name not in was or was[name] is not value and was[name] != value:
                yield f"{name} = {value!r} (planned with {was.get(name)!r})"
        for name, now, old in zip(self.names, self.tensors, before.tensors, strict=True):
            if now[0] != old[0]:
                yield f"{name} of shape {list(now[0])} (planned with {list(old[0])})"
            if now[1] != old[1]:
                yield f"{name} of {now[1]} (planned with {old[1]})"
            if now[2] != old[2]:
                yield f"{name} with requires_grad={now[2]} (planned with {old[2]})"
        modes = dict(before.modes)
        moved = [(path, mode) for path, mode in self.modes if modes.get(path, mode) != mode]
        if moved:
            path, mode = moved[0]
            where = f"module {path}" if path else "the model"
            yield f"{where} in {_mode(mode)} mode (planned in {_mode(not mode)} mode; {_EVAL})"
        if self.casts != before.casts:
            yield f"torch.autocast of {_casts(self.casts)} (planned with {_casts(before.casts)})"


def signature_of(captured: Captured, model: nn.Module, device: torch.device) -> Signature:
    """That of the call that `captured` was made for, by the modes that `model` is in."""
    inputs = [source for source in captured.sources.values() if source.kind == "input"]
    return Signature.of(captured.input_tree, inputs, dict(model.named_modules()), device)


def uncast() -> contextlib.AbstractContextManager[Any]:
    """What a program runs under: its casts are ops of it, and autocast around the call must add none."""
    if torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    return contextlib.nullcontext()


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _casts(casts: tuple[tuple[str, torch.dtype], ...]) -> str:
    return ", ".join(f"{kind} to {dtype}" for kind, dtype in casts) or "nothing"


def check_held(modules: Mapping[str, nn.Module], sources: Sequence[Source]) -> list[torch.Tensor]:
    """The tensors that a program takes from a model's modules. ReplayError where one has another dtype than it was
    captured with, or is to be trained and was not."""
    places = [source.name.rpartition(".") for source in sources]
    found = [getattr(modules[path], key) for path, _, key in places]
    for source, tensor in zip(sources, found, strict=True):
        if tensor.dtype != source.dtype:
            raise ReplayError(
                f"'{source.name}' must stay {source.dtype}, as it was when the model was captured, got {tensor.dtype}; "
                "convert the model before you plan it"
            )
        if source.kind == "parameter" and tensor.requires_grad and not source.requires_grad:
            raise ReplayError(
                f"'{source.name}' must stay frozen, as it was when the model was captured, got requires_grad=True; its "
                "gradient is no part of the plan: plan the model with it trainable, and freeze it after apply for as "
                "long as you like"
            )
    return found

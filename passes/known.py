"""Values that are known while a model is traced under fake tensors.

A tensor that is made of constants alone (an arange, a mask of ones, what is computed from them) has the same value in
every run: where the model reads it (`bool`, `.item()`, `nonzero`), it is computed then and there. What is made of the
example's inputs and weights has a value too, but another run may have another one. A branch may read any of it, a shape
or a number what is made of integer inputs (masks, grids, labels): what was read becomes a guard, a further output of
the program that must be what it was when the model was captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..plans.errors import CaptureError
from . import _torch
from .trees import Tree

__all__ = ["Branches", "Guard", "Knowing", "guarded"]

aten = torch.ops.aten
# What a value depends on: constants, the example's inputs of integers and truth values, anything of the example, or
# constants and random draws, which tell nothing of another run.
FIXED, GIVEN, ANY, DRAWN = range(4)
# Ops that look at the shape and dtype of their first tensor alone.
_SHAPED = (
    "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "empty_like", "new_empty", "copy",
    "fill",
)  # fmt: skip
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


# Calls whose shapes depend on how many elements of a mask are true, and on nothing else of it.
_COUNTED = (
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
    torch.Tensor.masked_select,
    torch.Tensor.nonzero,
    torch.masked_select,
    torch.nonzero,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What a model read of its example while it was captured: a condition, whether it held, and the line."""

    held: bool
    line: str


@dataclasses.dataclass(slots=True, eq=False)
class _Recipe:
    """How a known tensor is made: a call on other recipes, or its value once that was asked for."""

    depends: int
    call: Callable[..., Any] | None = None
    args: tuple = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    index: int | None = None
    value: torch.Tensor | None = None

    def sources(self) -> list[_Recipe]:
        """What the call reads."""
        return [part for part in _torch.tree_leaves((self.args, self.kwargs)) if isinstance(part, _Recipe)]


def _value(recipe: _Recipe) -> torch.Tensor:
    """The tensor that `recipe` makes."""
    stack = [recipe]
    while stack:
        top = stack[-1]
        if top.value is not None:
            stack.pop()
            continue
        missing = [source for source in top.sources() if source.value is None]
        if missing:
            stack += missing
            continue
        args, kwargs = _torch.tree_map_only(_Recipe, lambda part: part.value, (top.args, top.kwargs))
        assert top.call is not None
        made = top.call(*args, **kwargs)
        top.value = made if top.index is None else made[top.index]
        top.args, top.kwargs = (), {}
    assert recipe.value is not None
    return recipe.value


class Knowing(_torch.FakeTensorMode):
    """Fake tensors some of which have a known value.

    `allowed` says on what the values that are read may depend, `guessed` whether one depended on the example.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.recipes: Any = WeakTensorKeyDictionary()
        self.allowed = FIXED
        self.guessed = False

    def give(self, fake: torch.Tensor, real: torch.Tensor, *, inputs: bool) -> None:
        """Say what `fake`, an input or weight, is in the example."""
        self.recipes.pop(fake, None)
        if real.device.type != "meta" and not isinstance(real, _torch.FakeTensor):
            counts = inputs and not (real.is_floating_point() or real.is_complex())
            self.recipes[fake] = _Recipe(GIVEN if counts else ANY, value=real.detach())

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on fake tensors; where its result depends on values and they are known, by the values."""
        kwargs = kwargs or {}
        if func is aten._ctc_loss.Tensor:
            return self._ctc_loss(*args)
        try:
            out = super().dispatch(func, types, args, kwargs)
        except _torch.data_dependent_errors:
            recipe = self._recipe(func, args, kwargs)
            if recipe is None or recipe.depends > self.allowed:
                raise
            return self._answer(recipe)
        self._learn(func, args, kwargs, out)
        return out

    def _ctc_loss(self, log_probs: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses (batch) and, for the backward alone, states (batch, time, at most this many): see the rule."""
        time, batch = log_probs.shape[:2]
        states = 2 * (targets.shape[1] if targets.dim() == 2 else targets.numel()) + 1
        with self:
            return log_probs.new_empty(batch), log_probs.new_empty(batch, time, states)

    @contextlib.contextmanager
    def allowing(self, depends: int) -> Iterator[None]:
        """Let values be read that depend on so much."""
        before, self.allowed = self.allowed, depends
        try:
            yield
        finally:
            self.allowed = before

    def _answer(self, recipe: _Recipe) -> Any:
        assert recipe.call is not None
        with _torch.no_dispatch(), torch.no_grad():
            for source in recipe.sources():
                _value(source)
            args, kwargs = _torch.tree_map_only(_Recipe, lambda part: part.value, (recipe.args, recipe.kwargs))
            made = recipe.call(*args, **kwargs)
        self.guessed |= recipe.depends != FIXED
        return _torch.tree_map_only(torch.Tensor, lambda real: self._known(real, recipe.depends), made)

    def _known(self, real: torch.Tensor, depends: int) -> torch.Tensor:
        """A fake tensor of a known value."""
        with self:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        self.recipes[fake] = _Recipe(depends, value=real)
        return fake

    def _recipe(self, func: Any, args: Any, kwargs: Any) -> _Recipe | None:
        """How the call makes its result; None where it reads a tensor that is not known."""
        parts: dict[int, _Recipe] = {}
        name = func._schema.name.split("::")[-1]
        for tensor in _torch.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in parts:
                part = self._part(tensor, name in _SHAPED and not parts)
                if part is None:
                    return None
                parts[id(tensor)] = part
        args, kwargs = _torch.tree_map_only(torch.Tensor, lambda t: parts[id(t)], (tuple(args), dict(kwargs)))
        drawn = torch.Tag.nondeterministic_seeded in func.tags or name in _UNINITIALISED
        depends = {DRAWN if drawn else FIXED, *(part.depends for part in parts.values())}
        return _Recipe(ANY if DRAWN in depends and len(depends - {FIXED}) > 1 else max(depends), func, args, kwargs)

    def _part(self, tensor: torch.Tensor, shape_only: bool) -> _Recipe | None:
        """How an argument is made."""
        if not isinstance(tensor, _torch.FakeTensor):
            return _Recipe(FIXED, value=tensor)
        if not shape_only:
            return self.recipes.get(tensor)
        with _torch.no_dispatch():
            return _Recipe(FIXED, value=torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))

    def _learn(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func._schema.is_mutable:
            self.recipes.clear()  # whatever shares memory with what was written
            return
        made = list(out) if isinstance(out, (tuple, list)) else [out]
        given = {id(part) for part in _torch.tree_leaves((args, kwargs))}
        # What the op made of others, inside, is known by the op as a whole.
        fresh = [(at, t) for at, t in enumerate(made) if isinstance(t, torch.Tensor) and id(t) not in given]
        recipe = self._recipe(func, args, kwargs) if fresh else None
        if recipe is not None:
            for at, tensor in fresh:
                index = None if tensor is out else at
                self.recipes[tensor] = dataclasses.replace(recipe, index=index)


class Branches(TorchFunctionMode):
    """Note what the model reads of the example: only code that is under this mode may do so.

    `conditions` are what the guards must find again.
    """

    def __init__(self, known: Knowing, internal: Callable[[str], bool]) -> None:
        super().__init__()
        self.known, self.internal = known, internal
        self.conditions: list[torch.Tensor] = []
        self.guards: list[Guard] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run `func`; where it reads a value, give that of the example and note it."""
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ or (func is torch.Tensor.item and args[0].dtype == torch.bool):
            return self._branch(args[0]) if args[0].numel() == 1 else func(*args, **kwargs)
        if func is torch.tensor and args and _holds_tensors(args[0]):
            return torch.stack(args[0]).to(**kwargs)
        if func in (torch.masked_select, torch.Tensor.masked_select) and len(args) == 2:
            func, args = torch.Tensor.__getitem__, tuple(torch.broadcast_tensors(*args))
        try:
            return func(*args, **kwargs)
        except _torch.data_dependent_errors:
            read = [t for t in _torch.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            read = [t.detach() for t in read if not (t.is_floating_point() or t.is_complex())]
            if not read:
                raise
        for tensor in read:
            self._read((tensor != 0).sum() if func in _COUNTED else tensor)
        with self.known.allowing(GIVEN):
            return func(*args, **kwargs)

    def _branch(self, tensor: torch.Tensor) -> bool:
        condition = tensor.detach() != 0
        self.known.guessed = False
        with self.known.allowing(ANY):
            taken = bool(condition.item())
        if self.known.guessed:
            self._note(condition, taken)
        return taken

    def _read(self, tensor: torch.Tensor) -> None:
        """Note that all values of `tensor` are read."""
        self.known.guessed = False
        with self.known.allowing(GIVEN):
            values = tensor.tolist()
        if self.known.guessed:
            self._note((tensor == torch.tensor(values, dtype=tensor.dtype)).all(), True)

    def _note(self, condition: torch.Tensor, held: bool) -> None:
        self.conditions.append(condition.reshape(()))
        self.guards.append(Guard(held=held, line=self._line()))

    def _line(self) -> str:
        frames = [f for f in traceback.extract_stack() if not self.internal(f.filename)]
        return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _holds_tensors(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and bool(data) and all(isinstance(item, torch.Tensor) for item in data)


def guarded(tree: Tree, guards: Sequence[Guard]) -> Tree:
    """The outputs of `tree` and behind them one condition per guard, which building the outputs checks and drops."""
    if not guards:
        return tree
    count = len(tree.names)

    def build(new: Sequence[Any]) -> Any:
        for guard, condition in zip(guards, new[count:], strict=True):
            if bool(condition) is not guard.held:
                raise CaptureError(
                    "'inputs' must give the model what it read of its example when it was captured, got another value "
                    f"at {guard.line}; plan the model with such inputs, or keep branches and shapes that depend on "
                    "values out of it (torch.where, masks, a capacity)"
                )
        return tree.build(list(new[:count]))

    names = (*tree.names, *(f"guard.{index}" for index in range(len(guards))))
    return dataclasses.replace(tree, names=names, build=build)

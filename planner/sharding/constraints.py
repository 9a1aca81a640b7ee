"""What the user pins or forbids: layouts of parameters, inputs, outputs and nodes, by name.

    layers.*.wq.weight = S(0),R      pin: one placement per mesh axis; `*` for an axis leaves it open
    layers.*.w1.weight = S(*),*      split along whichever dim
    args.0 != R,R                    forbid

Names may hold `*` and match parameters, buffers, inputs, outputs and nodes (as `meshwright show` prints them), and
`3-60` or `5-59/6` for the numbers of blocks. A recipe (recipes.py) adds constraints of its own, on names as
they are.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...plans.errors import Infeasible, RequestError
from ...plans.layouts import REPLICATE, Layout, parse_placement, shard_dim
from ...plans.stamps import numbers_of
from .strategies import shardable

__all__ = ["SPLIT", "Constraint", "Constraints"]

# In a constraint: split along some dim.
SPLIT = "S(*)"
_FORM = re.compile(r"\s*(\S+)\s*(=|!=)\s*(\S.*?)\s*")
_NUMBERS = re.compile(r"(?<![^.])(\d+-\d+(?:/\d+)?)(?=[.:]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Pin (or, when `forbids`, forbid) a layout; None in `layout` leaves an axis open, S(*) the dim that is split."""

    name: str
    layout: tuple[str | None, ...]
    forbids: bool = False

    @classmethod
    def parse(cls, text: str, axes: int) -> Constraint:
        """A constraint from its text form, for a mesh of `axes` axes."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise RequestError(
                f"'constraint' must look like NAME = LAYOUT or NAME != LAYOUT, got {text!r}; e.g. 'args.0 = S(0),R'"
            )
        parts = [part.strip() for part in match.group(3).split(",")]
        if len(parts) != axes:
            raise RequestError(f"'constraint' must give one placement for each of the {axes} mesh axes, got {text!r}")
        layout = tuple(None if part == "*" else part if part == SPLIT else parse_placement(part) for part in parts)
        return cls(name=match.group(1), layout=layout, forbids=match.group(2) == "!=")

    def speaks_of(self, name: str) -> bool:
        """Whether it is about the tensor or node `name`."""
        if self.name == name or not _NUMBERS.search(self.name):
            return self.name == name or fnmatch.fnmatchcase(name, self.name)
        parts = _NUMBERS.split(self.name)
        globs = [fnmatch.translate(part) if at % 2 == 0 else r"(\d+)" for at, part in enumerate(parts)]
        match = re.fullmatch("".join(glob.removesuffix(r"\Z").removesuffix(r"\z") for glob in globs), name)
        spans = [numbers_of(part) for part in parts[1::2]]
        return match is not None and all(
            numbers is not None and int(number) in numbers
            for number, numbers in zip(match.groups(), spans, strict=True)
        )

    def allows(self, layout: Layout) -> bool:
        """Whether `layout` is left by this constraint."""
        same = all(
            want is None or want == have or (want == SPLIT and have[0] == "S")
            for want, have in zip(self.layout, layout, strict=True)
        )
        return same != self.forbids

    def __str__(self) -> str:
        return f"{self.name} {'!=' if self.forbids else '='} {','.join(part or '*' for part in self.layout)}"


@dataclass(slots=True, kw_only=True)
class Constraints:
    """The constraints of one request; remembers which of them met anything.

    With `held` False they keep apart what they speak of and leave it every layout: for solving with and without them.
    `recipe` names the one that adds `exact` constraints, by the whole name of what they speak of; those always hold.
    """

    items: tuple[Constraint, ...] = ()
    held: bool = True
    recipe: str = ""
    exact: Mapping[str, Constraint] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    wide: set[tuple[int, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, texts: Iterable[str | Constraint], axes: int, *, held: bool = True) -> Constraints:
        """From texts or Constraint values."""
        items = tuple(t if isinstance(t, Constraint) else Constraint.parse(t, axes) for t in texts)
        return cls(items=items, held=held)

    def key(self, name: str) -> tuple:
        """Which constraints speak of `name`, and what the recipe leaves to it: nodes that differ in it cannot share a
        decision."""
        own = self.exact.get(name)
        return *self._spoken(name), *([] if own is None else [own.layout])

    def _spoken(self, name: str) -> tuple[int, ...]:
        self.seen.add(name)
        found = self._speaking(name)
        self.used.update(found)
        return found

    def widen(self, name: str, shape: Sequence[int], mesh: Sequence[int]) -> None:
        """Let tensors of `shape` (elements) lie in every layout there is, if `name` is pinned to one that the search
        does not look at: a dim of one element that is split, or one that most devices get nothing of."""
        for item in (self.items[i] for i in self._spoken(name)):
            if SPLIT in item.layout:
                continue
            pinned = tuple(placement or REPLICATE for placement in item.layout)
            there = all(d is None or d < len(shape) for d in map(shard_dim, pinned))
            if there and not item.forbids and not shardable(shape, pinned, mesh):
                self.wide.add(tuple(shape))

    def allowed(self, name: str, layouts: Sequence[Layout]) -> list[bool]:
        """Which of `layouts` are left to `name`.

        When none is: RequestError for a constraint that no layout meets, or a recipe that does not fit, else Infeasible
        with the least set of them that conflict.
        """
        own = self.exact.get(name)
        found = [*([] if own is None else [own]), *(self.items[i] for i in self._spoken(name) if self.held)]
        left = _left(found, layouts)
        if found and not any(left):
            blamed = _conflict(found, layouts)
            shown = "; ".join(str(c) for c in blamed)
            some = ", ".join(" ".join(("[" + ",".join(x) + "]") for x in dict.fromkeys(layouts)).split(" ")[:8])
            if own in blamed:
                raise RequestError(
                    f"'recipe' must fit the model and the constraints, got {self.recipe}, by which {shown}; "
                    f"{name} can be held as {some}; take another recipe or mesh, or drop constraints"
                )
            message = f"'constraints' must leave {name} a layout, got {shown}; it can be held as {some}"
            raise RequestError(message) if len(blamed) == 1 else Infeasible(f"{message}; drop one of them")
        return left

    def check_used(self) -> None:
        """RequestError for a constraint that names nothing in the model."""
        for index, constraint in enumerate(self.items):
            if index not in self.used:
                near = difflib.get_close_matches(constraint.name, self.seen, n=3, cutoff=0.3)
                raise RequestError(
                    f"'constraints' must name a tensor or node of the model, got {constraint.name!r}; near: "
                    f"{', '.join(near) or 'nothing'}"
                )

    def alike(self, names: Iterable[str]) -> bool:
        """Whether every constraint speaks of all of `names` or of none."""
        return len({self._speaking(name) for name in names}) <= 1

    def _speaking(self, name: str) -> tuple[int, ...]:
        return tuple(i for i, constraint in enumerate(self.items) if constraint.speaks_of(name))


def _left(constraints: Sequence[Constraint], layouts: Sequence[Layout]) -> list[bool]:
    return [all(c.allows(layout) for c in constraints) for layout in layouts]


def _conflict(constraints: Sequence[Constraint], layouts: Sequence[Layout]) -> list[Constraint]:
    """Constraints that leave no layout, none of which can be spared."""
    kept = list(constraints)
    for one in constraints:
        rest = [c for c in kept if c is not one]
        if rest and not any(_left(rest, layouts)):
            kept = rest
    return kept

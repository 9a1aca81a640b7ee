"""Recipes: the ways of splitting a training step that have names, and how one is written for a mesh.

    fsdp                 over every axis of the mesh
    fsdp+tp              one way per axis, in the order of the axes
    tp:tp+fsdp:dp        by the names of axes (or their numbers); axes that no way names are left to the solver
    ddp:0+fsdp:1,2       a way over several axes

`hsdp` is short for ddp+fsdp; `zero3` is another name of fsdp, `fsdp-keep` of zero2; `zero-2` is read as zero2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import RequestError
from .meshes import Mesh

__all__ = ["RECIPES", "Recipe", "recipe_name"]

# What a way does along its axis, and what parameters, gradients and optimizer state do there.
RECIPES: Mapping[str, str] = {
    "ddp": "the batch is split; parameters, gradients and optimizer state are whole on every device",
    "fsdp": "the batch is split; parameters, gradients and optimizer state too: gathered for each use (ZeRO-3)",
    "zero1": "zero2, but gradients stay whole until the step's backward is done, and are reduced then",
    "zero2": "as fsdp, but a gathered parameter is kept from the forward to the backward (reshard_after_forward=False)",
    "zero3": "another name of fsdp",
    "fsdp-keep": "another name of zero2",
    "hsdp": "ddp over one axis, fsdp over the next",
    "tp": "weight products are split, outputs then inputs, vocabulary tables by rows; between them values are whole",
    "tp-sp": "tp, with the values between split over the tokens (sequence parallel)",
    "cp": "the sequence is split; keys and values are gathered for attention (context parallel)",
    "ep": "the batch is split and experts live on their devices; tokens travel to them (expert parallel)",
}
_SHORT = {"hsdp": ("ddp", "fsdp"), "zero3": ("fsdp",), "fsdp-keep": ("zero2",)}
_REFUSED = {
    "ring": "keys and values passed around in a ring",
}
_PART = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?::\s*([\w,\s]+?))?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way per mesh axis; None leaves an axis to the solver."""

    mesh: Mesh
    ways: tuple[str | None, ...]

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Recipe:
        """The recipe that `text` names for `mesh`; RequestError when it names none."""
        parts = [_part(piece, text) for piece in text.split("+")]
        if len(parts) == 1 and parts[0][1] is None and len(_SHORT.get(parts[0][0], "1")) == 1:
            return cls(mesh=mesh, ways=_long(parts[0][0]) * mesh.ndim)
        pairs: list[tuple[str, list[int] | None]] = []
        for name, axes in parts:
            pairs += _spread(name, None if axes is None else [_axis(axis, mesh, text) for axis in axes], text)
        taken = [axis for _, axes in pairs for axis in axes or []]
        rest = [axis for axis in range(mesh.ndim) if axis not in taken]
        if len(set(taken)) < len(taken):
            raise RequestError(f"'recipe' must give each axis one way, got {text!r}")
        open_ways = sum(axes is None for _, axes in pairs)
        if open_ways and open_ways != len(rest):
            raise RequestError(
                f"'recipe' must have one way for each of the axes {', '.join(mesh.axis_names)}, got {text!r}; name the "
                f"axes, e.g. 'fsdp:{mesh.axis_names[0]}', and those that you do not name are left to the solver"
            )
        ways: list[str | None] = [None] * mesh.ndim
        for name, axes in pairs:
            for axis in axes if axes is not None else [rest.pop(0)]:
                ways[axis] = name
        return cls(mesh=mesh, ways=tuple(ways))

    def axes(self, *names: str) -> list[int]:
        """Axes of more than one device along which one of the ways `names` is taken."""
        return [axis for axis, way in enumerate(self.ways) if way in names and self.mesh.shape[axis] > 1]

    def __str__(self) -> str:
        named = ((way, axis) for way, axis in zip(self.ways, self.mesh.axis_names, strict=True) if way)
        return "+".join(f"{way}:{axis}" for way, axis in named)


def recipe_name(ways: tuple[str, ...]) -> str:
    """What people call these ways together: hsdp for ddp then fsdp, one name where all are the same."""
    kept = [way for at, way in enumerate(ways) if at == 0 or ways[at - 1] != way]
    text = "+".join(kept)
    return re.sub(r"\bddp\+fsdp\b", "hsdp", text)


def _part(piece: str, text: str) -> tuple[str, list[str] | None]:
    match = _PART.fullmatch(piece)
    if match is None:
        raise RequestError(f"'recipe' must look like fsdp, fsdp+tp or fsdp:dp+tp:tp, got {text[:100]!r}")
    name = re.sub(r"^zero-(?=\d)", "zero", match.group(1).lower())
    if name in _REFUSED:
        raise RequestError(
            f"'recipe' must be one that the runtime can run, got {name} ({_REFUSED[name]}): it moves a piece only by "
            "collectives of a whole group; take cp, which gathers keys and values"
        )
    if name not in RECIPES:
        raise RequestError(f"'recipe' must be of the ways {', '.join(RECIPES)}, got {name!r}; see `meshwright recipes`")
    axes = match.group(2)
    return name, None if axes is None else [axis.strip() for axis in axes.split(",")]


def _long(name: str) -> tuple[str, ...]:
    return _SHORT.get(name, (name,))


def _spread(name: str, axes: list[int] | None, text: str) -> list[tuple[str, list[int] | None]]:
    """The plain ways of a short name, each with its axes."""
    ways = _long(name)
    if axes is None or len(ways) == 1:
        return [(way, axes) for way in ways]
    if len(axes) != len(ways):
        raise RequestError(f"'recipe' must give {name} {len(ways)} axes, for {' and '.join(ways)}, got {text!r}")
    return [(way, [axis]) for way, axis in zip(ways, axes, strict=True)]


def _axis(text: str, mesh: Mesh, recipe: str) -> int:
    if text in mesh.axis_names:
        return mesh.axis_names.index(text)
    if text.isdecimal() and int(text) < mesh.ndim:
        return int(text)
    raise RequestError(
        f"'recipe' must name axes of the mesh, {', '.join(mesh.axis_names)} or 0 to {mesh.ndim - 1}, got {text!r} in "
        f"{recipe!r}"
    )

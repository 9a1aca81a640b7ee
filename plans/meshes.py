"""A mesh: the devices of a job in a grid with named axes. Rank order is row-major, the last axis varies fastest."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import RequestError

__all__ = ["Mesh"]

_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("replica", "dp", "tp"), 4: ("replica", "dp", "cp", "tp")}


@dataclass(frozen=True, slots=True)
class Mesh:
    """Shape and axis names of a device grid, e.g. Mesh((8, 8), ("dp", "tp"))."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= 4 or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise RequestError(f"'mesh' must have 1 to 4 axes of at least 1 device, got {self.shape!r}")
        if len(self.axis_names) != len(self.shape) or len(set(self.axis_names)) != len(self.shape):
            raise RequestError(f"'axis_names' must name each of {len(self.shape)} axes once, got {self.axis_names!r}")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """A mesh from '8', '8x8' or 'dp=8,tp=8'."""
        if not isinstance(text, str):
            raise RequestError(f"'mesh' must be a text such as 8x8 or dp=8,tp=8, got {text!r}; see Mesh.of for a shape")
        if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,3}", text):
            return cls.of(tuple(int(n) for n in text.split("x")))
        if re.fullmatch(r"[A-Za-z_]\w*=[1-9]\d{0,5}(,[A-Za-z_]\w*=[1-9]\d{0,5}){0,3}", text):
            pairs = [part.split("=") for part in text.split(",")]
            return cls(tuple(int(n) for _, n in pairs), tuple(name for name, _ in pairs))
        raise RequestError(f"'mesh' must look like 8, 8x8 or dp=8,tp=8 with 1 to 4 axes, got {text!r}")

    @classmethod
    def parse_each(cls, text: str) -> Mesh | tuple[Mesh, ...]:
        """A mesh, or one for each pipeline rank, with strokes between: '4/2x2'."""
        found = tuple(cls.parse(part) for part in text.split("/"))
        return found[0] if len(found) == 1 else found

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Mesh:
        """A mesh of `shape` with the usual axis names."""
        if not isinstance(shape, tuple | list):
            raise RequestError(f"'shape' must be a tuple of devices per axis, got {shape!r:.80}; e.g. Mesh.of((2, 4))")
        return cls(tuple(shape), _NAMES.get(len(shape), ()))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` on the grid."""
        out: list[int] = []
        for n in reversed(self.shape):
            rank, index = divmod(rank, n)
            out.append(index)
        return tuple(reversed(out))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """Rank at a position of the grid."""
        out = 0
        for n, index in zip(self.shape, coordinate, strict=True):
            out = out * n + index
        return out

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """All positions in rank order."""
        return itertools.product(*(range(n) for n in self.shape))

    def group(self, axis: int, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that differ from `coordinate` only along `axis`, in order."""
        return tuple(self.rank((*coordinate[:axis], i, *coordinate[axis + 1 :])) for i in range(self.shape[axis]))

    def __str__(self) -> str:
        return "x".join(str(n) for n in self.shape)

"""Steps: what is done to a tensor on its way from one layout to another, each along one mesh axis.

all_gather(axis, dim)            split on dim  -> whole           a collective
reduce_scatter(axis, dim)        partial sum   -> split on dim    a collective
all_reduce(axis, op)             partial op    -> whole           a collective; op is sum, max or min
all_to_all(axis, from, to)       split on from -> split on to     a collective
slice(axis, dim)                 whole         -> split on dim    local: keep one's own piece
keep_first(axis)                 whole         -> partial sum     local: all ranks but the first hold zeros
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import RequestError

__all__ = ["STEP_FORMS", "Step", "parse_step"]

STEP_FORMS = {
    "all_gather": ("dim",),
    "reduce_scatter": ("dim",),
    "all_reduce": ("op",),
    "all_to_all": ("dim", "dim"),
    "slice": ("dim",),
    "keep_first": (),
}
_LOCAL = ("slice", "keep_first")
_FORM = re.compile(r"([a-z_]{1,32})\(([A-Za-z_]\w{0,31})((?:, [a-z0-9]{1,3}){0,2})\)", re.ASCII)
_WORD = {"dim": re.compile(r"\d{1,2}"), "op": re.compile(r"sum|max|min")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: its kind, the mesh axis, and the dims or the op, in the order of its text form."""

    kind: str
    axis: str
    arguments: tuple[int | str, ...]

    @property
    def is_local(self) -> bool:
        """Whether no bytes cross a link."""
        return self.kind in _LOCAL

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(str(part) for part in (self.axis, *self.arguments))})"


def parse_step(text: str) -> Step:
    """The step that `text` writes, e.g. 'all_to_all(tp, 0, 1)'; RequestError otherwise."""
    match = _FORM.fullmatch(text)
    words = tuple(match.group(3).split(", ")[1:]) if match else ()
    form = STEP_FORMS.get(match.group(1)) if match else None
    if match is None or form is None or len(form) != len(words):
        raise RequestError(f"'step' must be one of {', '.join(_examples())}, got {text[:200]!r}")
    for what, word in zip(form, words, strict=True):
        if not _WORD[what].fullmatch(word):
            raise RequestError(f"'step' must be one of {', '.join(_examples())}, got {text[:200]!r}")
    values = tuple(int(word) if what == "dim" else word for what, word in zip(form, words, strict=True))
    return Step(kind=match.group(1), axis=match.group(2), arguments=values)


def _examples() -> list[str]:
    return [f"{kind}({', '.join(('axis', *form))})" for kind, form in STEP_FORMS.items()]

"""Why a plan is as it is: what was chosen, what the next best would have been, and what its limits cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from .diff import Diff
from .plan import Predicted
from .words import bytes_words, seconds_words

if TYPE_CHECKING:
    from .facts import Fact

__all__ = ["Alternative", "Explanation", "Limit"]

_SHOWN = 12
_TIE = 1e-9


class Alternative(Struct, frozen=True, kw_only=True):
    """Another plan, found by solving again under `condition`, and what is proven of it.

    status       exact: no plan that meets the condition is faster. bounded: time ran out; the best one lies between
                 `bound_s` and the step time of `predicted`. unknown: time ran out before any was found; none is faster
                 than `bound_s`. none: no plan meets the condition, for `reason`. priced: one plan, nothing was solved
    reason       of none, why; of bounded, what else stayed as it is; of priced, what limit the plan breaks
    subject      the name whose layout differs; of a group, the one that it costs least to change
    layout       in words, of `subject` in that plan
    """

    condition: str
    status: str
    subject: str
    layout: str | None
    predicted: Predicted | None
    bound_s: float
    reason: str
    changes: Diff | None


class Limit(Struct, frozen=True, kw_only=True):
    """A limit of the request, whether it binds, and the plan without it or with more of it."""

    name: str
    binds: bool
    relaxed: tuple[Alternative, ...]


class Explanation(Struct, frozen=True, kw_only=True):
    """What `explain` says of a plan. `facts` are those that the plan records of the names asked for; `alternatives`,
    the nearest first, and `limits` take the model. `notes` say what else there is to know, each in a sentence."""

    predicted: Predicted
    facts: tuple[Fact, ...]
    alternatives: tuple[Alternative, ...]
    limits: tuple[Limit, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(_lines(self)).rstrip()


def _lines(found: Explanation) -> Iterator[str]:
    yield from _split(found.predicted)
    yield ""
    for fact in found.facts[:_SHOWN]:
        yield from fact.lines()
        yield ""
    if len(found.facts) > _SHOWN:
        yield f"... and {len(found.facts) - _SHOWN} more names"
        yield ""
    for alternative in found.alternatives:
        yield from _alternative(alternative, found.predicted)
        yield ""
    for limit in found.limits:
        yield from _limit(limit, found.predicted)
    yield from found.notes


def _split(predicted: Predicted) -> Iterator[str]:
    again = f" ({seconds_words(predicted.recompute_s)} of it recomputed)" if predicted.recompute_s else ""
    yield f"step    {seconds_words(predicted.step_time_s)}: {seconds_words(predicted.compute_s)} compute{again},"
    yield (
        f"        {seconds_words(predicted.exposed_communication_s)} exposed and "
        f"{seconds_words(predicted.hidden_communication_s)} hidden communication, "
        f"{seconds_words(predicted.optimizer_s)} optimizer"
    )
    yield f"memory  {bytes_words(predicted.memory.peak_bytes)} at the peak"


def _alternative(found: Alternative, base: Predicted) -> Iterator[str]:
    if found.status == "none":
        yield f"{found.condition}: no plan. {found.reason}"
        return
    if found.predicted is None:
        least = _change(found.bound_s, base.step_time_s)
        yield f"{found.condition}: time ran out before a plan was found; none is faster than {least}"
        return
    step = found.predicted.step_time_s
    yield f"{found.condition}: {found.subject} {found.layout}" if found.layout else found.condition
    exact = "exact: no such plan is faster"
    open_ = f"{found.reason or 'time ran out'}; proven: none under {seconds_words(found.bound_s)}"
    priced = f"as priced{f'; {found.reason}' if found.reason else ''}"
    proof = {"exact": exact, "priced": priced}.get(found.status, open_)
    yield f"  step    {_change(step, base.step_time_s)}, {proof}"
    for name in ("compute_s", "exposed_communication_s", "hidden_communication_s", "optimizer_s"):
        before, after = getattr(base, name), getattr(found.predicted, name)
        if abs(after - before) > _TIE * base.step_time_s:
            words = name.removesuffix("_s").replace("_", " ")
            yield f"            {words} {_signed(after - before)} to {seconds_words(after)}"
    before, after = base.memory.peak_bytes, found.predicted.memory.peak_bytes
    more = f"{'-' if after < before else '+'}{bytes_words(abs(after - before))}" if after != before else "the same"
    yield f"  memory  {bytes_words(after)} ({more})"
    if found.changes is not None:
        yield from (f"  {line}" for line in found.changes.lines(most=_SHOWN))


def _change(after: float, before: float) -> str:
    return f"{seconds_words(after)} ({_signed(after - before)}, {_percent(after / before - 1) if before else 'new'})"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{seconds_words(abs(seconds))}"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.2g}%" if abs(ratio) >= 1e-6 else "+0%"


def _limit(limit: Limit, base: Predicted) -> Iterator[str]:
    yield f"{limit.name}: {'binds' if limit.binds else 'does not bind'}"
    for relaxed in limit.relaxed:
        yield f"  {relaxed.condition}: {_saving(relaxed, base)}"


def _saving(found: Alternative, base: Predicted) -> str:
    if found.predicted is None:
        return "no plan fits" if found.status == "none" else "time ran out"
    saved = base.step_time_s - found.predicted.step_time_s
    most = max(saved, base.step_time_s - found.bound_s)
    share, least = 100 / base.step_time_s if base.step_time_s else 0.0, _TIE * base.step_time_s
    if found.status == "exact":
        return (
            f"would save {share * saved:.2g} % ({seconds_words(saved)}), exact"
            if saved > least
            else "would save nothing, exact"
        )
    return f"would save {max(0.0, share * saved):.2g} to {share * most:.2g} %: {found.reason or 'time ran out'}"

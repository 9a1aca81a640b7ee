"""How the price of one op of a plan comes about: its terms, their parameters and sources, and how sure they are."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...cost_models.calibration import Calibration
from ...cost_models.parameters import Parameter, family_of_kind, parameters_of
from ...cost_models.workload import Primitive
from ...passes.graph import values_of
from ...plans.errors import RequestError
from ...plans.plan import Plan
from ...plans.words import bytes_words, seconds_words
from ..sharding.own_rules import OpRule
from ..workloads import Writer
from .explain import Given, reopen, same_prices

__all__ = ["PriceNote", "PriceTerm", "price_of", "primitive_s"]

_SIZES = {"product": ("m", "n", "k", "batch"), "attention": ("batch", "heads", "queries", "keys", "head size")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTerm:
    """One kernel or collective: `seconds` of all `times` that it runs; `uncertainty` is relative."""

    what: str
    seconds: float
    times: float
    uncertainty: float
    parameters: tuple[Parameter, ...]

    def lines(self, sources: list[str]) -> list[str]:
        """As text; sources are named by their numbers in `sources`, which grows."""
        times = "" if self.times == 1 else f", {self.times:g} times"
        lines = [f"{seconds_words(self.seconds):>9}  {self.what}{times}, +-{self.uncertainty:.0%}"]
        for p in self.parameters:
            if p.source not in sources:
                sources.append(p.source)
            value = f"{p.value:.4g} {p.unit}".rstrip()
            lines.append(f"{'':11}{p.name:<28} {value:<18} [{sources.index(p.source) + 1}]")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceNote:
    """The price of an op under a plan: compute, the host's launch within it, and moves of what it reads, before any of
    these is hidden behind compute; `count` is how many ops of the model it stands for."""

    name: str
    count: float
    seconds: float
    host_s: float
    host_uncertainty: float
    source: str
    compute: tuple[PriceTerm, ...]
    moves: tuple[PriceTerm, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {seconds_words(self.seconds)} each, {self.count:g} in the model"]
        lines.append(f"costs from {self.source}")
        sources: list[str] = []
        for term in self.compute:
            lines += term.lines(sources)
        if self.host_s > 0:
            lines.append(f"{seconds_words(self.host_s):>9}  launches by the host, +-{self.host_uncertainty:.0%}")
        if self.moves:
            lines.append("moves of what it reads, hidden or not:")
        for term in self.moves:
            lines += term.lines(sources)
        for at, source in enumerate(sources, 1):
            lines += textwrap.wrap(f"[{at}] {source}", 110, subsequent_indent="    ")
        return "\n".join(lines)


def price_of(
    plan: Plan,
    name: str,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    rules: Sequence[OpRule] = (),
    calibration: Given = None,
) -> PriceNote:
    """How the price of op `name` of `plan` comes about; a `*` in it means the blocks that the op is one of.

    The model, loss, rules and calibration are those that the plan was made with. Raises RequestError for a name that
    is no op of the plan.
    """
    same_prices(plan, calibration)
    prepared, found = reopen(plan, model, args, kwargs, loss=loss, rules=rules, calibration=calibration)
    form, captured, blocks = prepared.formulation, prepared.captured, prepared.blocks
    choices = [found.choices[index] for index in range(len(form.decisions))]
    ops = {captured.names[node]: node for node in captured.ops() if node in form.of}
    node = ops.get(name) or next((n for own, n in ops.items() if blocks.pattern(own) == name), None)
    if node is None:
        some = ", ".join(list(ops)[:3])
        raise RequestError(f"'price' must name an op of the plan, got {name!r}; such as {some}; see `meshwright show`")
    sizes = {n: [None if v is None else tuple(v.shape) for v in values_of(n)] for n in captured.names}
    writer = Writer(prepared, choices, sizes)
    line = writer.lines[writer.line(form.of[node], choices[form.of[node]])]
    moves = [move.line for reading, move in writer.read_moves() if reading.node is node]
    measured = Calibration.load(calibration) if isinstance(calibration, str | os.PathLike) else calibration
    sure, primitives = dict(form.prices.uncertainties), list(writer.recorder.known)

    def term(at: int, often: float) -> PriceTerm:
        primitive = primitives[at]
        return PriceTerm(
            what=_words(primitive),
            seconds=often * primitive_s(primitive, form.prices),
            times=often,
            uncertainty=sure[family_of_kind(primitive.kind)],
            parameters=parameters_of(primitive, form.prices, measured),
        )

    compute = tuple(term(at, often) for at, often in line.parts)
    return PriceNote(
        name=captured.names[node],
        count=blocks.share(captured.names[node]),
        seconds=sum(t.seconds for t in compute) + line.constant_s,
        host_s=line.constant_s,
        host_uncertainty=sure["host"],
        source=form.prices.source,
        compute=tuple(t for t in compute if t.seconds > 0),
        moves=tuple(term(at, often) for move in moves for at, often in move.parts),
    )


def _words(primitive: Primitive) -> str:
    sizes = [float(size) for size in primitive.sizes]
    if primitive.kind in _SIZES:
        shape = ", ".join(f"{label} {size:g}" for label, size in zip(_SIZES[primitive.kind], sizes, strict=True))
        side = (" backward" if primitive.backward else " forward") if primitive.kind == "attention" else ""
        return f"{primitive.kind}{side} {primitive.dtype}: {shape}{', causal' if primitive.causal else ''}"
    if primitive.kind == "fresh":
        return f"new memory: {bytes_words(sizes[0])}"
    if primitive.kind == "memory":
        return f"memory: {bytes_words(sizes[0])} read and written"
    return f"{primitive.kind} on mesh axis {primitive.axis}: {bytes_words(sizes[0])}"


def primitive_s(primitive: Primitive, prices: Any) -> float:
    """Seconds of one primitive whose sizes are numbers."""
    sizes = [np.float64(float(size)) for size in primitive.sizes]
    if primitive.kind == "product":
        return float(prices.gemm_s(*sizes, dtype=primitive.dtype))
    if primitive.kind == "attention":
        how = {"causal": primitive.causal, "backward": primitive.backward}
        return float(prices.attention_s(*sizes, dtype=primitive.dtype, **how))
    if primitive.kind in ("memory", "fresh"):
        return float((prices.memory_s if primitive.kind == "memory" else prices.fresh_s)(sizes[0]))
    return float(prices.collective_s(primitive.kind, sizes[0], primitive.axis))

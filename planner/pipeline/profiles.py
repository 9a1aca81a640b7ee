"""A bare layer profile: what each layer of a model costs, in the order of the model, without the model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cost_models.pipeline import StageCosts
from ...plans import RequestError

__all__ = ["LayerProfile", "StageRow", "equal_cuts", "load_profile", "load_stage_row"]

_EMBEDDING, _HEAD = "E", "L"
_KINDS = ("F", "B", "W")
# As in plan files: sums of larger numbers would lose what they are made of.
_LARGEST = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """The units that a cut may fall between: an embedding or head if the profile has one, and each layer.

    costs: (F, input gradient, weight gradient) of each unit. layers: how many layers a unit counts for, 1 or, for
    embedding and head, 0. memory: what a unit holds from F until I and W have each given back half.
    """

    name: str
    unit: str
    symbols: str
    costs: tuple[tuple[float, float, float], ...]
    layers: tuple[int, ...]
    memory: tuple[float, ...]
    delay: float = 0.0
    ranks: int | None = None
    microbatches: int | None = None
    memory_limit: float | None = None

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.costs)

    def stage_costs(self, cuts: Sequence[int], *, overhead: float = 0.0) -> StageCosts:
        """Costs of the stages that end before unit `cuts[0]`, `cuts[1]`, ..., the last at the end."""
        pieces = list(zip([0, *cuts], [*cuts, self.units], strict=True))
        sums = [[math.fsum(cost[part] for cost in self.costs[a:b]) for a, b in pieces] for part in range(3)]
        held = [math.fsum(self.memory[a:b]) for a, b in pieces]
        return StageCosts(
            forward=tuple(sums[0]),
            input_gradient=tuple(sums[1]),
            weight_gradient=tuple(sums[2]),
            memory_forward=tuple(held),
            memory_input_gradient=tuple(-amount / 2 for amount in held),
            memory_weight_gradient=tuple(-amount / 2 for amount in held),
            delay=self.delay,
            overhead=overhead,
        ).complete()

    def layers_of(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(sum(self.layers[a:b]) for a, b in zip([0, *cuts], [*cuts, self.units], strict=True))

    def symbols_of(self, cuts: Sequence[int]) -> tuple[str, ...]:
        """The symbols of each stage's units."""
        return tuple(self.symbols[a:b] for a, b in zip([0, *cuts], [*cuts, self.units], strict=True))

    def cuts_of(self, layers: Sequence[int]) -> tuple[int, ...]:
        """The cuts of stages with so many layers each; embedding and head stay with the first and the last."""
        total = sum(self.layers)
        if any(count < 0 for count in layers) or sum(layers) != total:
            raise RequestError(f"'partition' must be layers per stage that sum to {total}, got {list(layers)}")
        lead = 1 if self.layers[0] == 0 else 0
        cuts, at = [], lead
        for count in layers[:-1]:
            at += count
            cuts.append(at)
        return tuple(cuts)

    def one_f_one_b_memory(self, ranks: int, microbatches: int) -> float:
        """What the first rank holds at most under 1F1B with equal layers: the limit that others are compared at."""
        return min(ranks, microbatches) * max(self.stage_costs(equal_cuts(self, ranks)).memory_forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A row of fixed stages: their costs, ranks, micro-batches and the memory limit per rank, if any."""

    costs: StageCosts
    ranks: int
    microbatches: int
    memory_limit: float | None

    @property
    def one_f_one_b_memory(self) -> float:
        """What the first rank holds at most under 1F1B."""
        per_rank = self.costs.memory_forward[:: self.ranks]
        return min(self.ranks, self.microbatches) * math.fsum(per_rank)


def equal_cuts(profile: LayerProfile, stages: int) -> tuple[int, ...]:
    """Cuts into stages of the same number of layers, the first ones one more where it does not divide."""
    total = sum(profile.layers)
    if stages > total:
        raise RequestError(
            f"'stages' must be at most the {total} layers for equal layers, got {stages}; use fewer ranks or chunks"
        )
    size, more = divmod(total, stages)
    return profile.cuts_of([size + (stage < more) for stage in range(stages)])


def load_profile(
    text: str,
    *,
    layers: int | None = None,
    pattern: str | None = None,
    tick: float | None = None,
    delay: float | None = None,
) -> LayerProfile:
    """The profile in 'FILE.json' or 'FILE.json:NAME'.

    The file holds {"profiles": {NAME: {"F": {symbol: time}, "B": ..., "W": ..., "pattern": symbols}}}, or one such
    profile, or {"rows": [...]} of normalised layers, NAME then the row's number. E is the embedding, L the head.
    layers repeats or shortens the pattern; tick rounds each unit's times to whole ticks, which become the unit.
    """
    data, name = _read(text)
    entry = _entry(data, name, text)
    pattern = pattern or entry.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise RequestError(
            f"'profile' must have a pattern of its layers, got none in {text}; add --pattern, e.g. --pattern TT"
        )
    if layers is not None:
        pattern = (pattern * layers)[:layers]
    ends = [symbol if symbol in entry["F"] else "" for symbol in (_EMBEDDING, _HEAD)]
    symbols = ends[0] + pattern.strip(_EMBEDDING + _HEAD) + ends[1]
    costs = tuple(_unit_cost(entry, symbol, text) for symbol in symbols)
    if tick is not None:
        costs = tuple((_ticks(f, tick), _ticks(b, tick), _ticks(w, tick)) for f, b, w in costs)
    held = entry.get("memory", {})
    return LayerProfile(
        name=name or Path(text).stem,
        unit=str(entry.get("unit", data.get("unit", ""))) if tick is None else "ticks",
        symbols=symbols,
        costs=costs,
        layers=tuple(int(symbol not in (_EMBEDDING, _HEAD)) for symbol in symbols),
        memory=tuple(_number(held.get(s, 0.0 if s in (_EMBEDDING, _HEAD) else 2.0), text) for s in symbols),
        delay=_number(entry.get("comm", 0.0), text) / (tick or 1.0) if delay is None else delay,
        ranks=_count(entry.get("pp"), text),
        microbatches=_count(entry.get("microbatches"), text),
        memory_limit=None if entry.get("max_mem") is None else _number(entry["max_mem"], text),
    )


def load_stage_row(
    text: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    delay: float | None = None,
    overhead: float = 0.0,
) -> StageRow:
    """Row ROW of 'FILE.json:ROW' (or the only row): p, m, F, B, W (one number, or one per stage), comm, max_mem.

    What is given here takes the place of the row's.
    """
    data, name = _read(text)
    rows = data.get("rows", [data]) if isinstance(data, dict) else data
    if name is None and len(rows) != 1:
        raise RequestError(f"'--stage-costs' must name one of {len(rows)} rows, got {text}; add :0")
    try:
        row = rows[int(name or 0)]
        ranks = int(row["p"]) if ranks is None else ranks
        microbatches = int(row["m"]) if microbatches is None else microbatches
        stages = ranks * int(row.get("chunks", 1))
        parts = [row[kind] if isinstance(row[kind], list) else [row[kind]] * stages for kind in _KINDS]
        limit = row.get("max_mem", row.get("mem"))
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise RequestError(f"'--stage-costs' must have a row with p, m, F, B and W, got {text} ({error!r})") from None
    forward, input_gradient, weight_gradient = (tuple(_number(value, text) for value in part) for part in parts)
    if ranks < 1 or microbatches < 1 or len(forward) % ranks:
        raise RequestError(f"'--stage-costs' must have p and m of at least 1 and a multiple of p stages, got {text}")
    costs = StageCosts(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        delay=_number(row.get("comm", 0.0), text) if delay is None else delay,
        overhead=overhead,
    ).complete()
    limit = None if limit is None else _number(limit, text)
    return StageRow(costs=costs, ranks=ranks, microbatches=microbatches, memory_limit=limit)


def _read(text: str) -> tuple[Any, str | None]:
    path, colon, name = text.rpartition(":")
    if not colon or Path(text).exists():
        path, name = text, None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8")), name
    except (OSError, ValueError) as error:
        raise RequestError(f"'file' must be a JSON file, got {path} ({error})") from None


def _entry(data: Any, name: str | None, text: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise RequestError(f"'profile' must be a JSON object, got {text}")
    known = data.get("profiles")
    if isinstance(data.get("rows"), list):
        known = {str(index): _normalised(row) for index, row in enumerate(data["rows"])}
    if known is None:
        known = {name or "": data}
    if name is None and len(known) == 1:
        name = next(iter(known))
    entry = known.get(name or "")
    if not isinstance(entry, dict) or not all(isinstance(entry.get(kind), dict) for kind in _KINDS):
        raise RequestError(f"'profile' must be one of {', '.join(map(str, known))} with F, B and W, got {text}")
    return entry


def _normalised(row: Any) -> Any:
    """A row of normalised layers as a profile: layer types 1 and 2 in turn (2 only if it costs anything) and a head."""
    if not isinstance(row, dict) or "FBW_layer1" not in row:
        return row
    parts = {"1": row["FBW_layer1"], "2": row.get("FBW_layer2", [0]), _HEAD: row["FBW_head"]}
    parts = {symbol: values for symbol, values in parts.items() if any(values)}
    entry: dict[str, Any] = {kind: {s: v[i] for s, v in parts.items()} for i, kind in enumerate(_KINDS)}
    return {**entry, "pattern": "12" if "2" in parts else "1", "unit": "forward of a layer"}


def _unit_cost(entry: dict[str, Any], symbol: str, text: str) -> tuple[float, float, float]:
    try:
        forward, backward, weight = (_number(entry[kind][symbol], text) for kind in _KINDS)
    except KeyError:
        raise RequestError(
            f"'profile' must have F, B and W of {symbol!r}, which its pattern names, got {text}"
        ) from None
    return forward, backward, weight


def _number(value: Any, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise RequestError(f"'cost' must be a number from 0 to {_LARGEST:g}, got {value!r} in {text}; mend the file")
    return float(value)


def _ticks(value: float, tick: float) -> float:
    return float(round(value / tick))


def _count(value: Any, text: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise RequestError(f"'pp' and 'microbatches' must be whole numbers of at least 1, got {value!r} in {text}")
    return value

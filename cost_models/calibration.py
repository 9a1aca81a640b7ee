"""Calibrations: what was measured on one machine, as a file that prices are made from and that plans cite.

A calibration starts from a device's sheet and replaces what could be measured. Every quantity has a unit, an
uncertainty and the number of samples behind it; `samples` are the measurements themselves, so that a file can be
fitted again. The file is JSON, versioned, and read as strictly as a plan: reading it runs nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ..plans import plan_file
from ..plans.errors import CalibrationError, PlanError
from ..plans.version import VERSION
from .collectives import KINDS
from .devices import Device, Measured, Update, load_device
from .uncertainty import FAMILIES, datasheet_uncertainties

__all__ = ["Calibration", "Family", "Machine", "Quantity", "Sample", "calibrated", "check_values"]

_WAY_OUT = "measure again with `meshwright calibrate`, or correct that key"
Text = Annotated[str, Meta(min_length=1, max_length=512)]
Value = Annotated[float, Meta(ge=0.0, le=1e21)]
Share = Annotated[float, Meta(ge=0.0, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=2**48)]


class _Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all parts of a calibration have in common."""


class Machine(_Record, frozen=True, kw_only=True):
    """Where it was measured: processes at once, threads of each, and how busy the machine was beside (load average)."""

    processor: Text
    threads: Annotated[int, Meta(ge=1, le=4096)]
    ranks: Annotated[int, Meta(ge=1, le=4096)]
    load: Share


class Quantity(_Record, frozen=True, kw_only=True):
    """One measured number. `uncertainty` is relative, one standard deviation of the fit; `samples` stand behind it."""

    name: Text
    value: Value
    unit: Annotated[str, Meta(max_length=32)]
    uncertainty: Share
    samples: Count


class Family(_Record, frozen=True, kw_only=True):
    """How well prices of one family come out: errors are predicted / measured - 1 over its samples; `p90` is at least
    how far the repeats of a sample spread."""

    name: Literal["product", "attention", "memory", "collective", "update", "host"]
    rows: Count
    mean: Share
    p90: Share
    worst: Share


class Sample(_Record, frozen=True, kw_only=True):
    """One measurement: what ran, at which sizes, and the seconds measured and predicted; `spread` is the distance from
    the least to the middle of its repeats, relatively. Sizes by kind: see fitting.py."""

    kind: Text
    sizes: Annotated[tuple[Count, ...], Meta(max_length=16)]
    dtype: Text
    measured_s: Value
    predicted_s: Value
    spread: Share


class Calibration(_Record, frozen=True, kw_only=True):
    """Everything that `calibrate` found on one machine. `sheet` is the device whose data-sheet values fill the rest."""

    format: Literal["meshwright-calibration"] = "meshwright-calibration"
    version: Literal[1] = 1
    meshwright_version: Text
    torch_version: Text
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    sheet: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9._-]{0,63}$")]
    machine: Machine
    quantities: Annotated[tuple[Quantity, ...], Meta(min_length=1, max_length=256)]
    families: Annotated[tuple[Family, ...], Meta(max_length=16)]
    samples: Annotated[tuple[Sample, ...], Meta(max_length=65536)]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """The calibration in the file at `path`; CalibrationError when it is not a sound one of this version."""
        try:
            data = plan_file.read(path)
        except PlanError as error:
            raise CalibrationError(str(error).replace("plan 'path'", "'calibration'").split(";")[0]
                                   + "; give the file that `meshwright calibrate -o FILE` wrote") from None  # fmt: skip
        return cls.from_bytes(data, where=os.fspath(path))

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "the bytes given") -> Calibration:
        """The calibration in `data`; CalibrationError names the key that is missing, unknown or out of range."""
        try:
            if len(data) > plan_file.LIMIT_BYTES:
                raise ValueError("more than 64 MiB")
            raw = json.loads(data, object_pairs_hook=_once)
            _check_version(raw, where)
            found = msgspec.convert(raw, cls)
            _same_keys(raw, msgspec.to_builtins(found), "")
            check_values(found)
        except CalibrationError:
            raise
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise CalibrationError(
                f"'calibration' must follow its schema, got {_clean(str(error))}; in {_clean(where)}; {_WAY_OUT}"
            ) from None
        return found

    def to_bytes(self) -> bytes:
        """The calibration as canonical JSON."""
        check_values(self)
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to `path`: all of it or, when anything fails, nothing."""
        plan_file.write(path, self.to_bytes(), what="'calibration'")

    def digest(self) -> str:
        """The sha256 of the calibration's file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def cite(self) -> str:
        """How plans name it: with its digest, and what is still of the data sheet."""
        left = ", ".join(self.remaining()) or "nothing"
        return f"calibration {self.name} {self.digest()[:12]} of {self.sheet}; from the data sheet: {left}"

    def remaining(self) -> tuple[str, ...]:
        """What was not measured and is priced by the data sheet."""
        names = {quantity.name for quantity in self.quantities}
        missing = [label for label, needed in _LABELS.items() if not needed & names]
        return (*missing, "links between nodes", "memory size")

    def device(self) -> Device:
        """The sheet with what was measured in place of what it says."""
        return calibrated(load_device(self.sheet), {q.name: q.value for q in self.quantities})

    def check_for(self, device: str) -> None:
        """CalibrationError unless it was measured on a `device`."""
        if device != self.sheet:
            raise CalibrationError(
                f"'calibration' must be of the cluster's device {device}, got one of {self.sheet}; measure there with "
                "`meshwright calibrate`, or plan without it"
            )

    def uncertainties(self) -> dict[str, float]:
        """How far prices may be off, relatively, by family: nine of ten samples lie within; where none was measured, as
        for data sheets."""
        measured = {family.name: family.p90 for family in self.families if family.rows}
        return {**datasheet_uncertainties(), **measured}


# What can be measured, in words, and the quantities of which any shows that it was.
_LABELS: Mapping[str, frozenset[str]] = {
    "products": frozenset({f"product.{d}.flops_per_s" for d in ("float32", "bfloat16", "float16", "float64")}),
    "attention": frozenset({"attention.forward_efficiency"}),
    "memory bandwidth": frozenset({"memory.bytes_per_s"}),
    "host times": frozenset({"launch.eager_s"}),
    "compiled programs": frozenset({"launch.compiled_s"}),
    "links inside a node": frozenset({"link.bytes_per_s"}),
    "overlap": frozenset({"overlap.unhidden"}),
    "ranks beside each other": frozenset({"beside.product"}),
    "optimizers": frozenset({"update.adamw.per_byte_s"}),
}


def calibrated(sheet: Device, values: Mapping[str, float]) -> Device:
    """`sheet` with the quantities in `values` (see `_PUT`); CalibrationError for a name that is not one."""
    device = sheet
    for name, value in values.items():
        head, _, tail = name.partition(".")
        if name in _PUT:
            device = _PUT[name](device, value)
        elif head == "product" and tail.endswith(".flops_per_s"):
            device = _with_peak(device, tail.removesuffix(".flops_per_s"), value)
        elif name.startswith("link.slowdown."):
            device = _with_slowdown(device, name.removeprefix("link.slowdown."), value)
        elif head == "beside" and tail in ("product", "memory", "host"):
            found = {**dict(device.measured.beside), tail: max(1.0, value)}
            device = _measured(device, beside=tuple(found.items()))
        elif head == "update" and tail.count(".") == 1:
            optimizer, field = tail.split(".")
            device = _with_update(device, optimizer, field, value)
        else:
            raise CalibrationError(f"'quantities' must have names that are known, got {_clean(name)}; {_WAY_OUT}")
    return device


def _with_peak(device: Device, dtype: str, value: float) -> Device:
    peaks = dict(device.peaks_flops_per_s)
    if dtype not in peaks:
        raise CalibrationError(f"'quantities' must be of types that {device.name} has, got {_clean(dtype)}; {_WAY_OUT}")
    peaks[dtype] = value / device.gemm.efficiency
    return dataclasses.replace(device, peaks_flops_per_s=tuple(peaks.items()))


def _with_slowdown(device: Device, kind: str, value: float) -> Device:
    if kind not in KINDS:
        raise CalibrationError(f"'quantities' must have names that are known, got {_clean(kind)}; {_WAY_OUT}")
    return _link(device, slowdowns=tuple({**dict(device.intra_link.slowdowns), kind: value}.items()))


def _with_update(device: Device, optimizer: str, field: str, value: float) -> Device:
    if field not in ("per_tensor_s", "per_byte_s"):
        raise CalibrationError(f"'quantities' must have names that are known, got {_clean(field)}; {_WAY_OUT}")
    known = {update.optimizer: update for update in device.measured.updates}
    update = known.get(optimizer) or Update(optimizer=optimizer, per_tensor_s=0.0, per_byte_s=0.0)
    known[optimizer] = dataclasses.replace(update, **{field: value})
    return _measured(device, updates=tuple(known.values()))


def _measured(device: Device, **fields: Any) -> Device:
    return dataclasses.replace(device, measured=dataclasses.replace(device.measured, **fields))


def _gemm(device: Device, **fields: Any) -> Device:
    return dataclasses.replace(device, gemm=dataclasses.replace(device.gemm, **fields))


def _attention(device: Device, **fields: Any) -> Device:
    first = dataclasses.replace(device.attention[0], **fields)
    return dataclasses.replace(device, attention=(first, *device.attention[1:]))


def _link(device: Device, **fields: Any) -> Device:
    return dataclasses.replace(device, intra_link=dataclasses.replace(device.intra_link, **fields))


_Put = Callable[[Device, float], Device]
_PUT: dict[str, _Put] = {
    "product.fixed_s": lambda d, v: _gemm(d, kernel_fixed_s=v),
    "product.units": lambda d, v: _gemm(d, sm_count=max(1, round(v))),
    "product.sustained_slowdown": lambda d, v: _gemm(d, sustained_slowdown=v),
    "memory.bytes_per_s": lambda d, v: dataclasses.replace(d, memory_bandwidth_bytes_per_s=v / d.memory_efficiency),
    "memory.fixed_s": lambda d, v: _measured(d, memory_fixed_s=v),
    "launch.eager_s": lambda d, v: dataclasses.replace(d, launch_overhead_s=v),
    "launch.compiled_s": lambda d, v: dataclasses.replace(d, launch_overhead_compiled_s=v),
    "link.bytes_per_s": lambda d, v: _link(
        d, bandwidth_bytes_per_s=v * d.intra_link.devices_per_link / d.intra_link.efficiency
    ),
    "overlap.unhidden": lambda d, v: _measured(d, unhidden=min(1.0, v)),
    **{
        f"attention.{key}": lambda d, v, key=key: _attention(d, **{key: v if "tokens" in key else min(v, 1.0)})
        for key in (
            "forward_efficiency",
            "backward_efficiency",
            "forward_ramp_tokens",
            "backward_ramp_tokens",
            "mask_saving",
        )
    },
    **{f"link.{key}": lambda d, v, key=key: _link(d, **{key: v}) for key in ("base_latency_s", "latency_s", "ramp_s")},
    **{
        name: lambda d, v, key=key: _measured(d, **{key: v})
        for name, key in {
            "launch.view_s": "view_s",
            "launch.step_s": "step_s",
            "launch.parameter_s": "parameter_s",
            "memory.cache_bytes": "cache_bytes",
            "memory.cache_bytes_per_s": "cache_bytes_per_s",
            "memory.fresh_s_per_byte": "fresh_s_per_byte",
            "link.skew_s": "skew_s",
        }.items()
    },
}
_ABOVE_ZERO = ("flops_per_s", "bytes_per_s", "efficiency", "units", "slowdown")


def check_values(calibration: Calibration) -> None:
    """CalibrationError for the first value that makes no sense."""
    names = [quantity.name for quantity in calibration.quantities]
    families = [family.name for family in calibration.families]
    for key, found in (("quantities", names), ("families", families)):
        twice = next((name for name in found if found.count(name) > 1), None)
        if twice is not None:
            raise CalibrationError(f"'{key}' must be given once, got {_clean(twice)} twice; {_WAY_OUT}")
    if set(families) - set(FAMILIES):
        raise CalibrationError(f"'families' must be some of {', '.join(FAMILIES)}, got {families}; {_WAY_OUT}")
    for text in _texts(msgspec.to_builtins(calibration)):
        if not text.isprintable():
            raise CalibrationError(f"'calibration' must hold printable text, got {_clean(ascii(text))}; {_WAY_OUT}")
    for quantity in calibration.quantities:
        zero = quantity.value == 0 and quantity.name.endswith(_ABOVE_ZERO)
        if zero or not math.isfinite(quantity.value) or not math.isfinite(quantity.uncertainty):
            raise CalibrationError(f"'{quantity.name}' must be above 0, got {quantity.value}; {_WAY_OUT}")
    device = calibration.device()
    if 0 < device.measured.cache_bytes_per_s < device.memory_rate_bytes_per_s:
        raise CalibrationError(
            f"'memory.cache_bytes_per_s' must be at least the memory's {device.memory_rate_bytes_per_s:.3g}, got "
            f"{device.measured.cache_bytes_per_s:.3g}; {_WAY_OUT}"
        )
    if (device.measured.cache_bytes > 0) != (device.measured.cache_bytes_per_s > 0):
        raise CalibrationError(f"'memory.cache_bytes' must come with memory.cache_bytes_per_s; {_WAY_OUT}")
    if device.measured == Measured() and not any(n.startswith(("product", "attention", "link")) for n in names):
        raise CalibrationError(f"'quantities' must measure something, got {names[:5]}; {_WAY_OUT}")


def _check_version(raw: Any, where: str) -> None:
    if not isinstance(raw, dict) or raw.get("format") != "meshwright-calibration":
        raise CalibrationError(
            f"'calibration' must be a file of `meshwright calibrate`, got another; in {_clean(where)}; {_WAY_OUT}"
        )
    if type(raw.get("version")) is not int or raw["version"] != 1:
        raise CalibrationError(
            f"'version' must be 1, got {_clean(repr(raw.get('version')))}; in {_clean(where)}; read it with the "
            f"version of meshwright that wrote it (this is {VERSION}), or measure again"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key that is given twice")
    return dict(pairs)


def _same_keys(raw: Any, clean: Any, at: str) -> None:
    if isinstance(clean, dict):
        for key in clean:
            if key not in raw:
                raise ValueError(f"no key {at}{key}")
            _same_keys(raw[key], clean[key], f"{at}{key}.")
    elif isinstance(clean, list | tuple):
        for left, right in zip(raw, clean, strict=True):
            _same_keys(left, right, at)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:300])

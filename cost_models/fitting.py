"""From measurements to quantities: the parameters of the cost models under which the measured times come out.

Sizes of a sample by kind:

    launch, view              ops
    product                   m, n, k, batch
    attention                 batch, heads, queries, keys, head size, causal, backward
    memory                    bytes moved by one kernel on memory that is there
    fresh                     bytes moved, bytes of new memory made
    fused                     bytes moved by a compiled chain
    small                     kernels of a compiled program that move next to nothing
    update.OPTIMIZER          tensors, bytes of each
    step                      products, other ops, views, parameters of a step of next to no work
    collective.KIND           bytes of the whole tensor, devices
    behind                    bytes of an all-reduce behind compute, devices, nanoseconds of the compute alone

Fits are of logarithms of times (a relative error counts alike on all sizes) with a loss that forgives outliers, family
by family, each with the parameters of those before it. scipy is imported only here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .calibration import Family, Quantity, Sample, calibrated
from .collectives import collective_s
from .devices import Device
from .kernels import attention_s, gemm_s, memory_s

__all__ = ["FAMILY_OF", "Taken", "fit", "predicted_s"]

# The share of a time that no model is expected to hold; the scale at which residuals count less.
_SCALE = 0.05
_UNITS = {
    "_s": "s", "_s_per_byte": "s/B", "per_byte_s": "s/B", "bytes_per_s": "B/s", "flops_per_s": "FLOP/s", "_bytes": "B",
    "tokens": "tokens",
}  # fmt: skip
FAMILY_OF = {
    "launch": "host", "view": "host", "step": "host", "small": "host", "product": "product", "attention": "attention",
    "memory": "memory", "fresh": "memory", "fused": "memory", "update": "update", "collective": "collective",
    "behind": "collective", "beside": "collective", "alternate": "collective",
}  # fmt: skip


class Taken(Protocol):
    """A measurement: see `Sample`."""

    @property
    def kind(self) -> str: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def measured_s(self) -> float: ...
    @property
    def spread(self) -> float: ...


def predicted_s(device: Device, taken: Taken, *, synchronous: bool) -> float:
    """Seconds of a sample; `synchronous` where the host's launch is part of every kernel's time, as on a CPU."""
    kind, _, what = taken.kind.partition(".")
    sizes, launch = taken.sizes, device.launch_overhead_s if synchronous else 0.0
    measured = device.measured
    if kind == "launch":
        return sizes[0] * device.launch_overhead_s
    if kind == "view":
        return sizes[0] * measured.view_s
    if kind == "product":
        m, n, k, batch = sizes
        return launch + gemm_s(device, m, n, k, batch=batch, dtype=taken.dtype)
    if kind == "attention":
        seconds = attention_s(device, *sizes[:5], dtype=taken.dtype, causal=bool(sizes[5]), backward=bool(sizes[6]))
        return launch + seconds
    if kind == "memory":
        return launch + memory_s(device, sizes[0])
    if kind == "fresh":
        return launch + memory_s(device, sizes[0]) + sizes[1] * measured.fresh_s_per_byte
    if kind == "fused":
        return (device.launch_overhead_compiled_s if synchronous else 0.0) + memory_s(device, sizes[0])
    if kind == "small":
        return sizes[0] * (device.launch_overhead_compiled_s + memory_s(device, 64))
    if kind == "update":
        update = next(u for u in measured.updates if u.optimizer == what)
        return sizes[0] * (update.per_tensor_s + update.per_byte_s * sizes[1])
    if kind == "step":
        products, others, views, parameters = sizes
        ops = products * (device.gemm.kernel_fixed_s + device.launch_overhead_s) + views * measured.view_s
        ops += others * (device.launch_overhead_s + memory_s(device, 64))
        return ops + measured.step_s + parameters * measured.parameter_s
    if kind == "beside":
        return sizes[0] * 1e-9 * dict(measured.beside).get(what, 1.0)
    if kind == "alternate":
        one = collective_s("all_reduce", sizes[0], group_size=sizes[1], link=device.intra_link)
        return sizes[3] * (sizes[2] * 1e-9 + one + measured.skew_s)
    if kind == "behind":
        return sizes[2] * 1e-9 + measured.unhidden * collective_s(
            "all_reduce", sizes[0], group_size=sizes[1], link=device.intra_link
        )
    return collective_s(what, sizes[0], group_size=sizes[1], link=device.intra_link)


def fit(
    sheet: Device, taken: Sequence[Taken], *, synchronous: bool, known: Mapping[str, float] | None = None
) -> tuple[list[Quantity], list[Family], list[Sample]]:
    """Quantities that explain what was taken on a device of `sheet`, the errors by family, and the samples with their
    predicted times. `known` quantities are counted and not fitted. What no sample constrains stays as the sheet says
    and is not among the quantities."""
    values: dict[str, float] = dict(known or {})
    quantities = [Quantity(name=n, value=v, unit=_unit(n), uncertainty=0.0, samples=0) for n, v in values.items()]
    for rows, starts in _stages(sheet, taken):
        if rows and starts:
            found = _stage(sheet, values, rows, starts, synchronous=synchronous)
            values |= {quantity.name: quantity.value for quantity in found}
            quantities += found
    device = calibrated(sheet, values)
    samples = [
        Sample(
            kind=row.kind,
            sizes=row.sizes,
            dtype=row.dtype,
            measured_s=row.measured_s,
            predicted_s=predicted_s(device, row, synchronous=synchronous),
            spread=row.spread,
        )
        for row in taken
    ]
    return quantities, _families(samples), samples


_Stage = tuple[list[Taken], dict[str, tuple[float, float, float]]]


def _stages(sheet: Device, taken: Sequence[Taken]) -> Iterable[_Stage]:
    """What is fitted together: samples, and the parameters as (start, least, most)."""

    def of(*kinds: str) -> list[Taken]:
        return [row for row in taken if row.kind.partition(".")[0] in kinds]

    def least(rows: Sequence[Taken]) -> float:
        return min((row.measured_s for row in rows), default=1e-6)

    yield of("launch"), {"launch.eager_s": (1e-6, 1e-8, 1e-3)}
    yield of("view"), {"launch.view_s": (1e-6, 1e-9, 1e-3)}
    moved = of("memory")
    if len(moved) > 3:
        rates = [row.sizes[0] / row.measured_s for row in moved]
        slow = moved[-1].sizes[0] / moved[-1].measured_s
        starts = {"memory.bytes_per_s": (slow, slow / 4, slow * 4), "memory.fixed_s": (least(moved) / 4, 1e-9, 1e-3)}
        if max(rates) > 1.5 * slow:  # a cache shows itself
            peak = moved[rates.index(max(rates))].sizes[0]
            starts |= {"memory.cache_bytes": (1.4 * peak, peak / 4, peak * 8),
                       "memory.cache_bytes_per_s": (max(rates), slow * 4.0, max(rates) * 4)}  # fmt: skip
        yield moved, starts
    yield of("fresh"), {"memory.fresh_s_per_byte": (1e-11, 1e-14, 1e-6)}
    for at, dtype in enumerate(dict.fromkeys(row.dtype for row in of("product"))):
        rows = [row for row in of("product") if row.dtype == dtype]
        rate = max(2.0 * math.prod(row.sizes) / row.measured_s for row in rows)
        starts = {f"product.{dtype}.flops_per_s": (rate, rate / 4, rate * 4)}
        yield rows, starts if at else {**starts, "product.fixed_s": (least(rows) / 2, 1e-9, 1e-2)}
    keys = ("forward_efficiency", "backward_efficiency", "forward_ramp_tokens", "backward_ramp_tokens", "mask_saving")
    first = sheet.attention[0]
    ends = {key: (1e-1, 1e5) if "tokens" in key else (1e-3, 1.0) for key in keys}
    yield of("attention"), {f"attention.{key}": (float(getattr(first, key)), *ends[key]) for key in keys}
    yield of("small"), {"launch.compiled_s": (1e-6, 1e-9, 1e-2)}
    for name in sorted({row.kind for row in taken if row.kind.startswith("update.")}):
        rows = [row for row in taken if row.kind == name]
        yield rows, {f"{name}.per_tensor_s": (1e-5, 1e-9, 1e-1), f"{name}.per_byte_s": (1e-10, 1e-15, 1e-6)}
    yield of("step"), {"launch.step_s": (1e-4, 1e-9, 1.0), "launch.parameter_s": (1e-5, 1e-9, 1e-2)}
    together = of("collective")
    if together:
        link, groups = sheet.intra_link, {row.sizes[1] for row in together}
        rate = max(row.sizes[0] / row.measured_s for row in together)
        starts = {"link.bytes_per_s": (rate, rate / 10, rate * 100), "link.ramp_s": (link.ramp_s, 1e-9, 1e-2),
                  "link.base_latency_s": (least(together), 1e-9, 1e-1)}  # fmt: skip
        if len(groups) > 1:
            starts["link.latency_s"] = (link.latency_s, 1e-9, 1e-1)
        kinds = {row.kind.removeprefix("collective.") for row in together} - {"all_reduce"}
        starts |= {f"link.slowdown.{kind}": (1.0, 0.05, 20.0) for kind in sorted(kinds)}
        yield together, starts
    yield of("behind"), {"overlap.unhidden": (0.5, 1e-3, 1.0)}
    for name in ("product", "memory", "host"):
        yield [row for row in taken if row.kind == f"beside.{name}"], {f"beside.{name}": (1.1, 1.0, 16.0)}
    yield of("alternate"), {"link.skew_s": (1e-5, 1e-9, 1e-1)}


def _stage(
    sheet: Device,
    known: Mapping[str, float],
    rows: Sequence[Taken],
    starts: Mapping[str, tuple[float, float, float]],
    *,
    synchronous: bool,
) -> list[Quantity]:
    """The best values of some parameters, from several starts, with one standard deviation each."""
    from scipy.optimize import least_squares

    names = list(starts)
    measured = np.log([row.measured_s for row in rows])
    weights = 1.0 / np.hypot(_SCALE, [row.spread for row in rows])

    def residuals(logs: np.ndarray) -> np.ndarray:
        device = calibrated(sheet, {**known, **dict(zip(names, np.exp(logs).tolist(), strict=True))})
        times = [predicted_s(device, row, synchronous=synchronous) for row in rows]
        return (np.log(np.maximum(times, 1e-12)) - measured) * weights

    ends = np.log([(least, most) for _, least, most in starts.values()])
    middle = np.clip(np.log([start for start, _, _ in starts.values()]), ends[:, 0] + 1e-6, ends[:, 1] - 1e-6)
    best: Any = None
    for shift in (0.0, -1.0, 1.0):
        begin = np.clip(middle + shift, ends[:, 0] + 1e-6, ends[:, 1] - 1e-6)
        found = least_squares(
            residuals, begin, bounds=(ends[:, 0], ends[:, 1]), loss="soft_l1", diff_step=1e-4, max_nfev=200
        )
        best = found if best is None or found.cost < best.cost else best
    return [
        Quantity(name=name, value=float(np.exp(log)), unit=_unit(name), uncertainty=deviation, samples=len(rows))
        for name, log, deviation in zip(names, best.x, _deviations(best, len(rows)), strict=True)
    ]


def _deviations(found: Any, rows: int) -> list[float]:
    """One standard deviation of each logarithm, from the curvature at the best point and the size of the residuals; 1
    where nothing constrains it."""
    jacobian, residuals = found.jac, found.fun
    free = max(1, rows - jacobian.shape[1])
    scale = max(float((residuals**2).sum()) / free, 1e-4)
    spread = np.sqrt(np.clip(np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * scale, 0.0, 1e6))
    return [min(1.0, float(value)) for value in spread]


def _unit(name: str) -> str:
    endings = [ending for ending in _UNITS if name.endswith(ending)]
    return _UNITS[max(endings, key=len)] if endings else "" if endings else ""


def _families(samples: Sequence[Sample]) -> list[Family]:
    """Errors by family. Where as many parameters as samples leave none, their repeats still spread: nine of ten are at
    least as far off as these are in the middle."""
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(FAMILY_OF[sample.kind.partition(".")[0]], []).append(sample)
    found: list[Family] = []
    for name, members in rows.items():
        errors = [abs(sample.predicted_s / sample.measured_s - 1.0) for sample in members]
        spread = float(np.median([sample.spread for sample in members]))
        found.append(
            Family(
                name=name,  # type: ignore[arg-type]
                rows=len(members),
                mean=float(np.mean(errors)),
                p90=max(float(np.quantile(errors, 0.9)), spread),
                worst=max(errors),
            )
        )
    return found

"""What a price is made of: per primitive the parameters that its model reads, with unit and source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .calibration import Calibration
from .devices import Device, DeviceLink
from .links import AxisLink
from .prices import Prices
from .workload import Primitive

__all__ = ["Parameter", "family_of_kind", "parameters_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number of a cost model: its value and unit, and where it comes from."""

    name: str
    value: float
    unit: str
    source: str


def family_of_kind(kind: str) -> str:
    """The family whose uncertainty a primitive has."""
    if kind in ("product", "attention", "memory"):
        return kind
    return "memory" if kind == "fresh" else "collective"


def parameters_of(primitive: Primitive, prices: Prices, calibration: Calibration | None) -> tuple[Parameter, ...]:
    """The parameters that price `primitive`; those that a calibration measured say so, with their uncertainty."""
    device = prices.device
    if primitive.kind == "product":
        found = list(_product(device, primitive.dtype))
    elif primitive.kind == "attention":
        found = list(_attention(prices, primitive))
    elif primitive.kind in ("memory", "fresh"):
        found = list(_memory(device, primitive.kind))
    else:
        found = [p for link in _levels(prices.axes[primitive.axis]) for p in _link(link)]
    return tuple(_cited(parameter, calibration) for parameter in found)


def _product(device: Device, dtype: str) -> Iterator[Parameter]:
    gemm, sources = device.gemm, dict(device.sources)
    peak = device.peak_flops_per_s(dtype)
    source = f"peak {peak:.4g}: {sources['peak_flops_per_s']}; share {gemm.efficiency:g}: {gemm.source}"
    yield Parameter(name=f"product.{dtype}.flops_per_s", value=peak * gemm.efficiency, unit="FLOP/s", source=source)
    yield Parameter(name="product.sustained_slowdown", value=gemm.sustained_slowdown, unit="", source=gemm.source)
    yield Parameter(name="product.units", value=gemm.sm_count, unit="", source=gemm.source)
    yield Parameter(name="product.fixed_s", value=gemm.kernel_fixed_s, unit="s", source=gemm.source)


def _attention(prices: Prices, primitive: Primitive) -> Iterator[Parameter]:
    device, kernel = prices.device, prices.device.attention_kernel(prices.attention)
    side = "backward" if primitive.backward else "forward"
    peak = device.peak_flops_per_s(primitive.dtype)
    yield Parameter(
        name=f"peak.{primitive.dtype}", value=peak, unit="FLOP/s", source=dict(device.sources)["peak_flops_per_s"]
    )
    for key, unit in ((f"{side}_efficiency", ""), (f"{side}_ramp_tokens", "tokens")):
        source = f"kernel {kernel.name}: {kernel.source}"
        yield Parameter(name=f"attention.{key}", value=float(getattr(kernel, key)), unit=unit, source=source)


def _memory(device: Device, kind: str) -> Iterator[Parameter]:
    measured, source = device.measured, dict(device.sources)["memory"]
    if kind == "fresh":
        yield Parameter(
            name="memory.fresh_s_per_byte", value=measured.fresh_s_per_byte, unit="s/B", source="not measured"
        )
        return
    yield Parameter(name="memory.bytes_per_s", value=device.memory_rate_bytes_per_s, unit="B/s", source=source)
    if measured.cache_bytes > 0:
        yield Parameter(name="memory.cache_bytes", value=measured.cache_bytes, unit="B", source=source)
        yield Parameter(name="memory.cache_bytes_per_s", value=measured.cache_bytes_per_s, unit="B/s", source=source)
    fixed = device.gemm.kernel_fixed_s if measured.memory_fixed_s is None else measured.memory_fixed_s
    yield Parameter(name="memory.fixed_s", value=fixed, unit="s", source=device.gemm.source)


def _levels(axis: AxisLink) -> tuple[DeviceLink, ...]:
    if axis.nodes == 1:
        return (axis.intra,)
    return (axis.intra, axis.inter) if axis.members_per_node > 1 else (axis.inter,)


def _link(link: DeviceLink) -> Iterator[Parameter]:
    for key, value, unit in (
        ("bytes_per_s", link.rate_bytes_per_s, "B/s"),
        ("base_latency_s", link.base_latency_s, "s"),
        ("latency_s", link.latency_s, "s"),
        ("ramp_s", link.ramp_s, "s"),
    ):
        yield Parameter(name=f"link.{key}", value=value, unit=unit, source=f"{link.name}: {link.source}")


def _cited(parameter: Parameter, calibration: Calibration | None) -> Parameter:
    for quantity in calibration.quantities if calibration is not None else ():
        if quantity.name == parameter.name and calibration is not None:
            spread = f"+- {quantity.uncertainty:.0%} of {quantity.samples} samples" if quantity.samples else "as set"
            spread = "1 sample, spread unknown" if quantity.samples == 1 else spread
            source = f"calibration {calibration.name} {calibration.digest()[:12]}, {spread}"
            return Parameter(name=parameter.name, value=parameter.value, unit=parameter.unit, source=source)
    return parameter

"""Device sheets: what one accelerator can do, read strictly from the TOML files in `devices/` beside this module.

Every table of a sheet has a `source`; a number that is an engineering estimate says so there. To add a device, add a
file; to describe one that is not shipped, write the same file anywhere and give its text to `read_device`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TypeVar

from ..plans.errors import RequestError

__all__ = [
    "Attention",
    "Device",
    "DeviceLink",
    "Gemm",
    "Measured",
    "Update",
    "device_names",
    "load_device",
    "read_device",
]

_DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
_MAY_BE_ZERO = ("switch_reduce_efficiency", "latency_s", "base_latency_s", "ramp_s", "forward_ramp_tokens",
                "backward_ramp_tokens", "mask_score_accesses", "tensor_accesses", "mask_saving")  # fmt: skip
_TABLES = ("peak_flops_per_s", "memory", "gemm", "launch", "attention", "intra_link", "nic")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """One level of wires as one device sees it, each way.

    `bandwidth_bytes_per_s` is the wire's, `efficiency` the share a large ring collective reaches, and
    `switch_reduce_efficiency` (0: none) the rate, as a share of the wire, at which the switch reduces a buffer for all.
    `latency_s` is one hop, `base_latency_s` the start of any collective, `ramp_s` how slowly the full rate is reached,
    and `devices_per_link` how many devices share one such wire. On a torus of `torus_dims` the bandwidth is that of all
    dims together, and a dim is closed to a ring from `torus_wrap` devices on. `slowdowns` are measured times of kinds
    of collectives against this model's.
    """

    name: str
    bandwidth_bytes_per_s: float
    efficiency: float
    switch_reduce_efficiency: float
    latency_s: float
    base_latency_s: float
    ramp_s: float
    devices_per_link: int
    source: str
    slowdowns: tuple[tuple[str, float], ...] = ()
    torus_dims: int = 0
    torus_wrap: int = 1

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes per second each way that one device gets in a large collective when all its neighbours use the link."""
        return self.bandwidth_bytes_per_s * self.efficiency / self.devices_per_link


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Matrix products: units, tile, the share of peak reached by the best shape, and the fixed time of a kernel.

    `sustained_slowdown` is the time in a long training step against that in a short run of one product: clocks under
    the power limit, layouts that the step dictates.
    """

    sm_count: int
    tile_m: int
    tile_n: int
    tile_k: int
    efficiency: float
    float8_efficiency: float
    kernel_fixed_s: float
    source: str
    sustained_slowdown: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention kernel: share of peak on long sequences at head size 128, and the keys at which half is reached.

    `speed_at_64` and `speed_at_256` are the speeds at those head sizes against 128, `ramp_at_256` the ramps' factor.
    An unfused implementation writes the scores to memory: `forward_score_accesses` and `backward_score_accesses` count
    how often each score is read or written, `mask_score_accesses` those that a causal mask adds to each, and
    `tensor_accesses` passes over a query-sized tensor in each direction (permutations, copies). `mask_saving` is the
    share of the masked products that a fused kernel leaves out.
    """

    name: str
    forward_efficiency: float
    backward_efficiency: float
    forward_ramp_tokens: float
    backward_ramp_tokens: float
    source: str
    speed_at_64: float = 0.87
    speed_at_256: float = 0.82
    ramp_at_256: float = 1.0
    forward_score_accesses: float = 0.0
    backward_score_accesses: float = 0.0
    mask_score_accesses: float = 0.0
    tensor_accesses: float = 0.0
    mask_saving: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer's update of a parameter on one device: seconds per tensor, and per byte of the parameter."""

    optimizer: str
    per_tensor_s: float
    per_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What no sheet states and `calibrate` measures; the defaults are the prices of a device that it has not seen.

    `view_s` is the host's time of an op that only views, `step_s` that of a step beside its ops, `parameter_s` that of
    a parameter in it beside its update. A kernel that moves at most `cache_bytes` runs at `cache_bytes_per_s`.
    `fresh_s_per_byte` is what the allocator takes for new memory, `memory_fixed_s` the fixed time of a memory-bound
    kernel (None: that of a product), `unhidden` the share of a hidden collective that its neighbours wait for all the
    same, `updates` the optimizers that were measured. `skew_s` is what a collective waits for the last of its ranks
    after compute, `beside` how much longer 'product', 'memory' and 'host' take while all ranks of the machine work.
    """

    view_s: float = 0.0
    step_s: float = 0.0
    parameter_s: float = 0.0
    cache_bytes: float = 0.0
    cache_bytes_per_s: float = 0.0
    fresh_s_per_byte: float = 0.0
    memory_fixed_s: float | None = None
    unhidden: float = 0.02
    updates: tuple[Update, ...] = ()
    skew_s: float = 0.0
    beside: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, units as named. Its first `attention` entry is the kernel that torch picks by default."""

    name: str
    version: int
    peaks_flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float
    framework_constant_bytes: int
    gemm: Gemm
    attention: tuple[Attention, ...]
    launch_overhead_s: float
    launch_overhead_compiled_s: float
    intra_link: DeviceLink
    nic: DeviceLink
    sources: tuple[tuple[str, str], ...]
    measured: Measured = Measured()

    def among_others(self) -> Device:
        """This device while all ranks of its machine work: they may share caches, memory and units."""
        slow = dict(self.measured.beside)
        product, memory, host = (slow.get(name, 1.0) for name in ("product", "memory", "host"))
        if product == memory == host == 1.0:
            return self
        m = self.measured
        replace = dataclasses.replace
        updates = tuple(
            replace(u, per_tensor_s=u.per_tensor_s * host, per_byte_s=u.per_byte_s * memory) for u in m.updates
        )
        return replace(
            self,
            peaks_flops_per_s=tuple((name, peak / product) for name, peak in self.peaks_flops_per_s),
            gemm=replace(self.gemm, kernel_fixed_s=self.gemm.kernel_fixed_s * host),
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s / memory,
            launch_overhead_s=self.launch_overhead_s * host,
            launch_overhead_compiled_s=self.launch_overhead_compiled_s * host,
            measured=replace(
                m, view_s=m.view_s * host, step_s=m.step_s * host, parameter_s=m.parameter_s * host,
                cache_bytes_per_s=m.cache_bytes_per_s / memory, fresh_s_per_byte=m.fresh_s_per_byte * memory, beside=(),
                memory_fixed_s=None if m.memory_fixed_s is None else m.memory_fixed_s * host, updates=updates,
            ),
        )  # fmt: skip

    @property
    def memory_rate_bytes_per_s(self) -> float:
        """Bytes per second that a large elementwise kernel moves."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense data-sheet peak in FLOP/s for `dtype` ('bfloat16', 'torch.bfloat16', 'tf32', 'float8_e4m3fn', ...).

        RequestError when the device has no matrix units for it.
        """
        key = _dtype_key(dtype)
        for name, value in self.peaks_flops_per_s:
            if name == key:
                return value
        known = ", ".join(name for name, _ in self.peaks_flops_per_s)
        raise RequestError(f"'dtype' must be one of {known} on {self.name}, got {dtype!r}; cast the model first")

    def attention_kernel(self, name: str | None) -> Attention:
        """The attention kernel called `name`, or the default one; RequestError lists what the sheet has."""
        for kernel in self.attention:
            if name is None or kernel.name == name:
                return kernel
        known = ", ".join(kernel.name for kernel in self.attention)
        raise RequestError(f"'attention' must be one of {known} on {self.name}, got {name!r}; leave it out")


_R = TypeVar("_R", DeviceLink, Gemm, Attention)


def device_names() -> tuple[str, ...]:
    """Names of the shipped sheets, sorted."""
    files = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def load_device(name: str) -> Device:
    """The shipped sheet called `name`; RequestError with the near names when there is none."""
    names = device_names()
    if name not in names:
        near = difflib.get_close_matches(str(name).lower(), names, n=4, cutoff=0.4) or list(names)
        raise RequestError(f"'device' must be a known device, got {name!r}; near names: {', '.join(near)}")
    where = f"cost_models/devices/{name}.toml"
    device = read_device((_folder() / f"{name}.toml").read_text(encoding="utf-8"), where)
    if device.name != name:
        raise RequestError(f"'name' must be {name!r}, got {device.name!r}; in {where}; rename one")
    return device


def read_device(text: str, where: str) -> Device:
    """The device in a sheet's text; RequestError names `where` and the key that is missing, unknown or out of range."""
    try:
        sheet = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"'device sheet' must be TOML, got {error}; in {where}; compare a shipped sheet") from None
    _require_keys(sheet, ("schema", "name", "version", *_TABLES), "the sheet", where)
    if sheet["schema"] != 1:
        raise RequestError(f"'schema' must be 1, got {sheet['schema']!r}; in {where}; use the version that wrote it")
    memory, launch, peaks = (_table(sheet, key, where) for key in ("memory", "launch", "peak_flops_per_s"))
    _require_keys(memory, ("memory_bytes", "bandwidth_bytes_per_s", "efficiency", "framework_constant_bytes", "source"),
                  "memory", where)  # fmt: skip
    _require_keys(launch, ("eager_s", "compiled_s", "source"), "launch", where)
    kernels = sheet["attention"]
    if not isinstance(kernels, list) or not kernels or not all(isinstance(row, dict) for row in kernels):
        raise RequestError(f"'attention' must be tables, got {kernels!r}; in {where}; compare a shipped sheet")
    return Device(
        name=_text(sheet, "name", where),
        version=_count(sheet, "version", where),
        peaks_flops_per_s=_peaks(peaks, where),
        memory_bytes=_count(memory, "memory_bytes", where),
        memory_bandwidth_bytes_per_s=_number(memory, "bandwidth_bytes_per_s", where),
        memory_efficiency=_number(memory, "efficiency", where, most=1.0),
        framework_constant_bytes=_count(memory, "framework_constant_bytes", where),
        gemm=_record(Gemm, _table(sheet, "gemm", where), where),
        attention=tuple(_record(Attention, row, where) for row in kernels),
        launch_overhead_s=_number(launch, "eager_s", where),
        launch_overhead_compiled_s=_number(launch, "compiled_s", where),
        intra_link=_record(DeviceLink, _table(sheet, "intra_link", where), where),
        nic=_record(DeviceLink, _table(sheet, "nic", where), where),
        sources=tuple((key, _text(sheet[key], "source", where)) for key in ("peak_flops_per_s", "memory", "launch")),
    )


def _folder() -> Traversable:
    return resources.files(__package__ or "meshwright.cost_models") / "devices"


def _dtype_key(dtype: str) -> str:
    key = str(dtype).removeprefix("torch.")
    return "float8" if key.startswith("float8") else key


def _record(kind: type[_R], table: Mapping[str, object], where: str) -> _R:
    """A dataclass from a table with exactly its fields, each read by its declared type."""
    fields = dataclasses.fields(kind)
    read = {"str": _text, "int": _count, "float": _rate}
    given = {field.name for field in fields if field.name in table and str(field.type) in read}
    needed = tuple(field.name for field in fields if field.default is dataclasses.MISSING or field.name in given)
    _require_keys(table, needed, kind.__name__.lower(), where)
    return kind(
        **{field.name: read[str(field.type)](table, field.name, where) for field in fields if field.name in given}
    )


def _table(sheet: Mapping[str, object], key: str, where: str) -> dict[str, object]:
    value = sheet[key]
    if not isinstance(value, dict):
        raise RequestError(f"'{key}' must be a table, got {value!r}; in {where}; compare a shipped sheet")
    return value


def _require_keys(table: Mapping[str, object], keys: tuple[str, ...], title: str, where: str) -> None:
    if set(table) != set(keys):
        missing, unknown = sorted(set(keys) - set(table)), sorted(set(table) - set(keys))
        raise RequestError(
            f"'{title}' must have the keys {', '.join(keys)}, got missing {missing} and unknown {unknown}; in {where}; "
            "compare a shipped sheet"
        )


def _peaks(table: Mapping[str, object], where: str) -> tuple[tuple[str, float], ...]:
    unknown = sorted(set(table) - {*_DTYPES, "source"})
    if unknown or len(table) < 2:
        known = ", ".join(_DTYPES)
        raise RequestError(f"'peak_flops_per_s' must have some of {known}, got {unknown}; in {where}; rename them")
    return tuple((dtype, _number(table, dtype, where)) for dtype in _DTYPES if dtype in table)


def _rate(table: Mapping[str, object], key: str, where: str) -> float:
    """A number above 0 (efficiencies at most 1), or 0 where a thing may be absent."""
    return _number(table, key, where, zero=key in _MAY_BE_ZERO, most=1.0 if key.endswith("efficiency") else math.inf)


def _number(table: Mapping[str, object], key: str, where: str, *, zero: bool = False, most: float = math.inf) -> float:
    value, number = table[key], math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    if not 0 <= number <= most or math.isinf(number) or (number == 0 and not zero):
        least = "of at least 0" if zero else "above 0"
        raise RequestError(f"'{key}' must be a number {least}, at most {most:g}, got {value!r}; in {where}; correct it")
    return number


def _count(table: Mapping[str, object], key: str, where: str) -> int:
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"'{key}' must be a whole number of at least 1, got {value!r}; in {where}; correct it")
    return value


def _text(table: Mapping[str, object], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"'{key}' must be text, got {value!r}; in {where}; say where the numbers come from")
    return value

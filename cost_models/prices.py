"""Prices of one cluster seen through one mesh: the single thing that the planner asks for seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..plans.clusters import Cluster
from ..plans.errors import RequestError
from ..plans.meshes import Mesh
from . import collectives, kernels
from .calibration import Calibration
from .devices import Device, load_device
from .kernels import Numbers, Times
from .links import AxisLink, axis_link, check_size, pipeline_mesh
from .uncertainty import datasheet_uncertainties

__all__ = ["Prices"]


def _datasheet() -> tuple[tuple[str, float], ...]:
    return tuple(datasheet_uncertainties().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of kernels and collectives on a cluster and mesh. Numbers or numpy arrays in, the same out.

    `launch_s` is the host's time per kernel (compiled programs pay less) and is in no other price; `capacity_bytes` is
    what a rank may fill; `source` says where the numbers come from; `attention` names a kernel of the sheet or is None
    for its first. Calibration replaces `device` and `axes` by measured ones. `uncertainties` says by family of kernels
    how far they may be off, relatively.
    """

    device: Device
    axes: tuple[AxisLink, ...]
    launch_s: float
    capacity_bytes: int
    source: str
    attention: str | None = None
    uncertainties: tuple[tuple[str, float], ...] = field(default_factory=_datasheet)

    @property
    def step_s(self) -> float:
        """Seconds of a step beside its ops, moves and updates."""
        return self.device.measured.step_s

    @property
    def view_s(self) -> float:
        """Seconds of an op that launches no kernel."""
        return self.device.measured.view_s

    @property
    def unhidden(self) -> float:
        """The share of a collective behind compute that is paid for all the same."""
        return self.device.measured.unhidden

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        mesh: Mesh,
        *,
        compiled: bool,
        device: Device | None = None,
        attention: str | None = None,
        stage_of: int = 1,
        calibration: Calibration | None = None,
    ) -> Prices:
        """Data-sheet prices of `cluster`, those of another `device`, or what a `calibration` of its device measured; of
        a pipeline of `stage_of` ranks, each with a mesh of its own on neighbouring devices, `mesh` is one.

        RequestError when the device is unknown or mesh and cluster differ in size. A cluster's `memory_bytes` is taken
        as what a rank may fill; else it is the device's memory less the framework's constant.
        """
        whole = mesh if stage_of == 1 else pipeline_mesh(mesh, stage_of)
        check_size(cluster, whole)
        if calibration is not None:
            calibration.check_for(cluster.device)
            device = calibration.device()
        sheet = device or load_device(cluster.device)
        sheet = sheet.among_others() if whole.size > 1 else sheet
        known = f"{'datasheet' if device is None else 'device'} {sheet.name} v{sheet.version}"
        sheet.attention_kernel(attention)
        return cls(
            device=sheet,
            axes=tuple(axis_link(cluster, whole, axis, sheet) for axis in range(whole.ndim - mesh.ndim, whole.ndim)),
            launch_s=sheet.launch_overhead_compiled_s if compiled else sheet.launch_overhead_s,
            capacity_bytes=cluster.least_memory_bytes(whole.size)
            or sheet.memory_bytes - sheet.framework_constant_bytes,
            source=known if calibration is None else calibration.cite(),
            attention=attention,
            uncertainties=_datasheet() if calibration is None else tuple(calibration.uncertainties().items()),
        )

    def gemm_s(self, m: Numbers, n: Numbers, k: Numbers, batch: Numbers = 1, dtype: str = "bfloat16") -> Times:
        """Seconds of `batch` products of (m, k) by (k, n) inside a training step, at the clocks that it sustains."""
        return kernels.gemm_s(self.device, m, n, k, batch=batch, dtype=dtype) * self.device.gemm.sustained_slowdown

    def attention_s(
        self,
        batch: Numbers,
        heads: Numbers,
        q_len: Numbers,
        kv_len: Numbers,
        head_dim: Numbers,
        dtype: str = "bfloat16",
        causal: bool = True,
        backward: bool = False,
    ) -> Times:
        """Seconds of one fused attention over `heads` query heads, the backward alone if `backward`."""
        return kernels.attention_s(
            self.device, batch, heads, q_len, kv_len, head_dim,
            dtype=dtype, causal=causal, backward=backward, kernel=self.attention,
        )  # fmt: skip

    def memory_s(self, moved_bytes: Numbers) -> Times:
        """Seconds of a kernel bound by memory that reads and writes `moved_bytes` in all."""
        return kernels.memory_s(self.device, moved_bytes)

    def fresh_s(self, made_bytes: Numbers) -> Times:
        """Seconds that the allocator takes for `made_bytes` of new memory."""
        return made_bytes * self.device.measured.fresh_s_per_byte

    def update_s(self, optimizer: str, passes: float, size_bytes: Numbers) -> Times:
        """Seconds in which `optimizer` updates a parameter of `size_bytes`: measured, or `passes` over that much."""
        size = np.asarray(size_bytes, np.float64)
        if optimizer == "none":
            return np.zeros(size.shape)
        host = np.where(size > 0, self.device.measured.parameter_s, 0.0)
        for update in self.device.measured.updates:
            if update.optimizer == optimizer:
                return host + np.where(size > 0, update.per_tensor_s + update.per_byte_s * size, 0.0)
        return host + np.where(passes > 0, self.memory_s(passes * size), 0.0)

    def collective_s(self, kind: str, size_bytes: Numbers, axis: int) -> Times:
        """Seconds of a collective along mesh axis `axis`; `size_bytes` is the whole tensor of one group."""
        if not 0 <= axis < len(self.axes):
            raise RequestError(f"'axis' must be 0 to {len(self.axes) - 1}, got {axis!r}; count mesh axes from 0")
        seconds = collectives.axis_collective_s(kind, size_bytes, self.axes[axis])
        return seconds + (seconds > 0) * self.device.measured.skew_s
